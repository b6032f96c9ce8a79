/* Ownership of jobs: claims, phases, ends, expiry, cancellation, occupancy.

   R runners with one slot each take J jobs of one run from a server that keeps
   leases. Every atomic step is one transaction of the engine, or one thing that a
   runner, the clock, the network or an operator does. A pause is a process that
   takes no step; a node that ends loses a request or a reply, since a transaction
   is all or nothing. Of a request, the reply may be lost, it may arrive again
   later, or arrive only later; the slot "late" holds one of these at a time, and
   it survives the process that sent it.

   Faults are bounded in number (CRASHES, LOST, LATE, FENCES), attempts by the
   budget: so every execution ends, and everything_ends needs no fairness.

   Every property is an assertion on a flag of its name, checked after every step,
   or the formula at the end. docs/model.md says where each action is in the
   engine, and what is left out. A name in BROKEN_ takes one rule away. */

#ifndef R
#define R 2		/* runners, at most 3 */
#endif
#ifndef J
#define J 1		/* jobs, at most 2 */
#endif
#ifndef BUDGET
#define BUDGET 3	/* attempts of a job that infrastructure may end */
#endif
#ifndef RETRY
#define RETRY 0		/* further attempts that the job's policy grants for a loss */
#endif
#ifndef CANCELS
#define CANCELS 1	/* does somebody cancel the run? */
#endif
#ifndef CRASHES
#define CRASHES 1	/* of runners */
#endif
#ifndef LOST
#define LOST 1		/* replies */
#endif
#ifndef LATE
#define LATE 1		/* requests that arrive twice, or late */
#endif
#ifndef FENCES
#define FENCES 1	/* hosts that an operator declares dead, fewer than R */
#endif

#define EPOCHS (BUDGET + RETRY)
#define ATTEMPTS (J * EPOCHS)
#define ATTEMPT(j, e) ((j) * EPOCHS + (e) - 1)
#define JOB(a) ((a) / EPOCHS)
#define EPOCH(a) ((a) % EPOCHS + 1)

/* Phases, and above them what a runner has to say at the end. */
#define CLAIMED 0
#define PREPARING 1
#define EXECUTING 2
#define SUCCESS 3
#define FAILED 4
#define CANCELLED 5
#define HAND_OVER 6
#define ABORTED 7	/* a conclusion only */
#define USER_CODE_MAY_HAVE_RUN(p) ((p) >= EXECUTING)

/* States of a job. */
#define READY 0
#define RUNNING 1
#define CANCELLING 2
#define FINISHED 3

/* Kinds of requests. */
#define CLAIM 1
#define PHASE 2
#define END 3
#define REPORT 4
#define OPEN 5

/* Answers. */
#define ACCEPTED 1
#define GONE 2		/* the lease is not current */
#define CANCEL 3	/* it is, and the run is cancelling */

/* ---- the database ---- */
byte state[J];
byte conclusion[J];
bool queued[J];		/* admitted, and open to claims */
byte epoch[J];
byte phase[J];		/* of the current attempt */
byte infra[J];		/* attempts that infrastructure ended */
byte granted[J];	/* attempts that policy granted */
bool lease[J];		/* the current attempt's */
bool expired[J];	/* it has run out in database time */
byte attempt_of[ATTEMPTS];	/* runner + 1 */
byte attempt_session[ATTEMPTS];
byte attempt_request[ATTEMPTS];
byte attempt_end[ATTEMPTS];	/* the stored answer to the end its runner reported */
byte occupant[R];	/* attempt + 1 that takes the runner's slot, until its end is proven */
byte reserved;		/* the tenant's reservations */
byte session[R];	/* the open one */
byte opened[R];		/* bits: sessions that were ever opened */

/* ---- the runners' own ---- */
bool up[R];
bool dead[R];		/* the host, declared so by an operator */
bool greeted[R];	/* the session is known to be open */
byte life[R];		/* number of the process, and of its session */
byte request[R];	/* number of the claim */
byte mine[R];		/* attempt + 1 */
byte doing[R];
byte ended[R];		/* attempt + 1 whose end has to be reported */
byte box[R];		/* attempt + 1 whose sandbox is there, in truth */

/* ---- one request on the way that nobody waits for any more ---- */
byte late_kind, late_runner, late_what, late_more;
#ifdef BROKEN_GUARD_ONCE
bool late_passed;	/* it had passed the guard before it waited */
#endif

byte crashes, lost, lates, fences, cancels;

/* ---- what must hold ---- */
byte wins[J];
byte winner[J];
byte ran[J];		/* attempts that have started user code */
bool one_winner = true;
bool winner_is_current = true;
bool no_stale_accept = true;
bool epoch_rises = true;
bool one_job_a_claim = true;
bool no_rerun_on_a_guess = true;
bool told_is_stored = true;
bool cancel_is_final = true;
bool cancelled_is_over = true;
bool slots_are_true = true;
bool reserved_once = true;

hidden byte ans, jj, aa, rr, heard, here, serves, waits;

#if R == 1
#define ANY(p) (p(0))
#elif R == 2
#define ANY(p) (p(0) || p(1))
#else
#define ANY(p) (p(0) || p(1) || p(2))
#endif
#if J == 1
#define ALL_JOBS(p) (p(0))
#define HOLDING (queued[0] + lease[0])
#else
#define ALL_JOBS(p) (p(0) && p(1))
#define HOLDING (queued[0] + lease[0] + queued[1] + lease[1])
#endif

#define OCCUPIES(r) (occupant[r] && JOB(occupant[r] - 1) == jj)
#define RUNS(r) (box[r] && JOB(box[r] - 1) == jj)
#define UNTRUE(r) (box[r] && occupant[r] != box[r])

inline check() {
	if
	:: ANY(UNTRUE) -> slots_are_true = false
	:: else
	fi;
	if
	:: reserved != HOLDING -> reserved_once = false
	:: else
	fi;
	jj = 0;
	do
	:: jj < J ->
		if
		:: wins[jj] > 1 -> one_winner = false
		:: else
		fi;
		if
		:: wins[jj] == 1 && winner[jj] != epoch[jj] -> winner_is_current = false
		:: else
		fi;
		if
		:: ran[jj] > 1 + granted[jj] -> no_rerun_on_a_guess = false
		:: else
		fi;
		if
		:: state[jj] == FINISHED && conclusion[jj] == CANCELLED && ANY(RUNS) -> cancelled_is_over = false
		:: else
		fi;
		jj++
	:: else -> break
	od;
	jj = 0;
	assert(no_stale_accept);
	assert(one_winner);
	assert(winner_is_current);
	assert(epoch_rises);
	assert(one_job_a_claim);
	assert(no_rerun_on_a_guess);
	assert(told_is_stored);
	assert(cancel_is_final);
	assert(cancelled_is_over);
	assert(slots_are_true);
	assert(reserved_once)
}

/* ---- the guard: the whole tuple, under the locks ---- */
#define TUPLE_OF(a) (lease[JOB(a)] && epoch[JOB(a)] == EPOCH(a) && !expired[JOB(a)])
#define TUPLE(r, a) (TUPLE_OF(a) && attempt_of[a] == (r) + 1)
#if defined(BROKEN_NO_FENCE)
#define CURRENT(r, a) (true)
#elif defined(BROKEN_GUARD_ONCE)
#define CURRENT(r, a) (TUPLE(r, a) || waits == 1 && late_passed)
#else
#define CURRENT(r, a) TUPLE(r, a)
#endif
#ifdef BROKEN_STATE_ONLY
#define MAY_END(r, a) (lease[JOB(a)])
#else
#define MAY_END(r, a) CURRENT(r, a)
#endif

inline conclude(j, c) {
	state[j] = FINISHED;
	conclusion[j] = c
}

/* A cancelling job is over when nothing holds it and nothing occupies a slot for it. */
inline settle(j) {
	jj = j;
	if
	:: state[j] == CANCELLING && !lease[j] && !ANY(OCCUPIES) -> conclude(j, CANCELLED)
	:: else
	fi;
	jj = 0
}

inline release(r, a) {
	if
	:: occupant[r] == a + 1 -> occupant[r] = 0
	:: else
	fi
}

inline unlease(j) {
	lease[j] = false;
	expired[j] = false;
	reserved--
}

/* What becomes of a job whose attempt infrastructure ended. */
inline decide_lost(j) {
	infra[j]++;
	if
	:: infra[j] >= BUDGET -> conclude(j, FAILED)	/* dead letter */
	:: infra[j] < BUDGET && RETRY > 0 && granted[j] >= RETRY -> conclude(j, FAILED)
	:: infra[j] < BUDGET && RETRY > 0 && granted[j] < RETRY -> granted[j]++; state[j] = READY
#ifdef BROKEN_GUESS
	:: infra[j] < BUDGET && RETRY == 0 -> state[j] = READY
#else
	:: infra[j] < BUDGET && RETRY == 0 && !USER_CODE_MAY_HAVE_RUN(phase[j]) -> state[j] = READY
	:: infra[j] < BUDGET && RETRY == 0 && USER_CODE_MAY_HAVE_RUN(phase[j]) -> conclude(j, ABORTED)
#endif
	fi
}

/* Ends a lease whose holder did not ask for it. */
inline end_against(r, a, proven) {
	unlease(JOB(a));
	if
	:: proven -> release(r, a)
#ifndef BROKEN_GHOSTS
	:: !proven && phase[JOB(a)] == CLAIMED -> release(r, a)	/* nothing was begun, nothing will be */
#endif
	:: else
#ifdef BROKEN_SLOT_FREED
		release(r, a)
#endif
	fi;
	if
	:: state[JOB(a)] == CANCELLING ->
#ifdef BROKEN_TIMEOUT_CANCELS
		conclude(JOB(a), CANCELLED)
#else
		settle(JOB(a))
#endif
	:: else -> decide_lost(JOB(a))
	fi
}

inline end_lease_of(r, j) {
	if
	:: lease[j] && attempt_of[ATTEMPT(j, epoch[j])] == r + 1 ->
		aa = ATTEMPT(j, epoch[j]);
		end_against(r, aa, true)
	:: else
	fi
}

/* Nothing runs on the runner's host any more: its leases end, also of attempts whose
   end was reported before, and its slot is free. */
inline end_all(r) {
	end_lease_of(r, 0);
#if J > 1
	end_lease_of(r, 1);
#endif
	if
	:: occupant[r] ->
		aa = occupant[r] - 1;
		release(r, aa);
		settle(JOB(aa))
	:: else
	fi
}

/* ---- transactions for runners ---- */

#define KNOWN(r, s, q, a) (attempt_of[a] == (r) + 1 && attempt_session[a] == (s) && attempt_request[a] == (q))

inline do_claim(r, s, q) {
	ans = GONE;
	here = 0;
	aa = 0;
	do
	:: aa < ATTEMPTS && !KNOWN(r, s, q, aa) -> aa++
	:: aa < ATTEMPTS && KNOWN(r, s, q, aa) -> here = aa + 1; break
	:: aa == ATTEMPTS -> break
	od;
	if
	:: session[r] != s	/* it has ended */
#ifdef BROKEN_CLAIM_FORGETS
	:: session[r] == s ->
#else
	:: session[r] == s && here ->
		if
		:: TUPLE(r, (here - 1)) -> ans = ACCEPTED
		:: else -> here = 0
		fi
	:: session[r] == s && !here ->
#endif
		aa = here;
		here = 0;
		if
#ifdef BROKEN_CLAIM_FORGETS
		:: queued[0]
#else
		:: !occupant[r] && queued[0]
#endif
			-> take(r, 0, s, q)
#if J > 1
#ifdef BROKEN_CLAIM_FORGETS
		:: queued[1]
#else
		:: !occupant[r] && queued[1]
#endif
			-> take(r, 1, s, q)
#endif
		:: else -> ans = 0
		fi
	fi;
	aa = 0
}

inline take(r, j, s, q) {
	if
	:: aa -> one_job_a_claim = false
	:: else
	fi;
	queued[j] = false;
#ifdef BROKEN_EPOCH_KEPT
	if
	:: epoch[j] == 0 -> epoch[j]++
	:: else
	fi;
#else
	epoch[j]++;
#endif
	if
	:: attempt_of[ATTEMPT(j, epoch[j])] -> epoch_rises = false
	:: else
	fi;
	here = ATTEMPT(j, epoch[j]) + 1;
	state[j] = RUNNING;
	phase[j] = CLAIMED;
	lease[j] = true;
	attempt_of[here - 1] = r + 1;
	attempt_session[here - 1] = s;
	attempt_request[here - 1] = q;
	occupant[r] = here;
	ans = ACCEPTED
}

inline accepts(a) {
#ifdef BROKEN_STATE_ONLY
	skip	/* so that its consequence shows */
#else
	if
	:: !TUPLE_OF(a) -> no_stale_accept = false
	:: else
	fi
#endif
}

inline do_phase(r, a, p) {
	if
	:: CURRENT(r, a) && state[JOB(a)] == RUNNING ->
		accepts(a);
		if
		:: p > phase[JOB(a)] -> phase[JOB(a)] = p
		:: else
		fi;
		ans = ACCEPTED
	:: CURRENT(r, a) && state[JOB(a)] == CANCELLING -> ans = CANCEL
	:: else -> ans = GONE
	fi
}

/* A completion or hand-over: it comes with evidence that the sandbox has ended. */
inline do_end(r, a, what) {
	if
	:: attempt_end[a] == what -> ans = ACCEPTED	/* a repeat */
#ifdef BROKEN_REPEAT_DECIDES
		; if :: what <= FAILED -> wins[JOB(a)]++ :: else fi
#endif
#ifdef BROKEN_REPEAT_RELEASES
		; reserved--
#endif
	:: attempt_end[a] != what && MAY_END(r, a) && state[JOB(a)] == CANCELLING && what != CANCELLED
#ifdef BROKEN_CANCEL_IGNORED
		-> cancel_is_final = false; unlease(JOB(a)); release(r, a); conclude(JOB(a), what)
#else
		-> ans = CANCEL
#endif
	:: attempt_end[a] != what && MAY_END(r, a) && (state[JOB(a)] == CANCELLING) == (what == CANCELLED) ->
		accepts(a);
		if
		:: lease[JOB(a)] -> unlease(JOB(a))
		:: else
		fi;
		release(r, a);
		attempt_end[a] = what;
		if
		:: what == CANCELLED -> settle(JOB(a))
		:: what == HAND_OVER -> decide_lost(JOB(a))
		:: else ->
			wins[JOB(a)]++;
			winner[JOB(a)] = EPOCH(a);
			conclude(JOB(a), what)
		fi;
		ans = ACCEPTED
	:: else -> ans = GONE
	fi
}

/* An occupancy report: frees the slot, ends no lease. */
inline do_report(r, a, ignored) {
#ifdef BROKEN_REPORT_DROPPED
	if
	:: lease[JOB(a)] && epoch[JOB(a)] == EPOCH(a)	/* it names a live lease */
	:: else -> release(r, a); settle(JOB(a))
	fi;
#else
	release(r, a);
	settle(JOB(a));
#endif
	ans = ACCEPTED
}

/* A new session of a swept host: earlier sessions end, and all that the runner was
   ever given has ended. */
inline do_open(r, s, ignored) {
	if
	:: opened[r] & (1 << s)	/* a repeat */
#ifndef BROKEN_OLD_LIFE_OPENS
	:: !(opened[r] & (1 << s)) && s < session[r]	/* of an earlier life */
	:: !(opened[r] & (1 << s)) && s > session[r]
#else
	:: !(opened[r] & (1 << s))
#endif
		->
		opened[r] = opened[r] | (1 << s);
		session[r] = s;
		end_all(r)
	fi;
	ans = ACCEPTED
}

/* ---- the network: what becomes of a request, and of its reply ---- */
inline send(k, r, x, y) {
	heard = 1;
	serves = 1;
	if
	:: true
	:: lost < LOST -> lost++; heard = 0
	:: lates < LATE && !late_kind -> keep(k, r, x, y)	/* and once more */
	:: lates < LATE && !late_kind -> keep(k, r, x, y); heard = 0; serves = 0	/* not yet */
#ifdef BROKEN_ANSWER_FIRST
	:: k == END && lost < LOST -> lost++; serves = 0; ans = ACCEPTED	/* and then the commit fails */
#endif
	fi
}

#define CALL(transaction, k, r, x, y) send(k, r, x, y); if :: serves -> transaction(r, x, y) :: else fi

inline keep(k, r, x, y) {
	lates++;
	late_kind = k;
	late_runner = r;
	late_what = x;
	late_more = y
#ifdef BROKEN_GUARD_ONCE
	;
	if
	:: k == PHASE || k == END -> late_passed = TUPLE(r, x)
	:: else
	fi
#endif
}

inline done() {
	ans = 0; heard = 0; serves = 0; here = 0; aa = 0; jj = 0;
	check()
}

/* ---- runners ---- */

inline forget(r) {
	mine[r] = 0;
	doing[r] = 0;
	request[r]++
}

/* Stops what runs and reports its end, because the lease cannot be trusted any more. */
inline give_up(r) {
	box[r] = 0;
	ended[r] = mine[r];
	forget(r)
}

inline start_user_code(r) {
	doing[r] = EXECUTING;
	ran[JOB(mine[r] - 1)]++
}

#define A(r) (mine[r] - 1)
#define ASKED(r, a) KNOWN(r, life[r], request[r], a)
#if ATTEMPTS == 2
#define ANSWERED(r) (ASKED(r, 0) || ASKED(r, 1))
#elif ATTEMPTS == 3
#define ANSWERED(r) (ASKED(r, 0) || ASKED(r, 1) || ASKED(r, 2))
#elif ATTEMPTS == 4
#define ANSWERED(r) (ASKED(r, 0) || ASKED(r, 1) || ASKED(r, 2) || ASKED(r, 3))
#endif
#define OPEN_JOB (queued[0] || queued[J - 1])

active [R] proctype Runner() {
	byte me = _pid;
end:
	do
	:: atomic {
	if
	/* a start: what an earlier process has left is ended first */
	:: !up[me] && !dead[me] ->
		box[me] = 0; up[me] = true; greeted[me] = false; life[me]++; request[me] = 0
	:: up[me] && !greeted[me] ->
		CALL(do_open, OPEN, me, life[me], 0);
		if
		:: heard -> greeted[me] = true
		:: else
		fi

	/* A claim that would be answered with nothing changes nothing. */
	:: up[me] && greeted[me] && !mine[me] && !ended[me] && (ANSWERED(me) || !occupant[me] && OPEN_JOB) ->
		waits = 0;
		CALL(do_claim, CLAIM, me, life[me], request[me]);
		if
		:: heard && ans == ACCEPTED -> mine[me] = here; doing[me] = CLAIMED
		:: heard && ans == GONE -> request[me]++
		:: else
		fi

	/* The phase is committed first; then the runner does what it has announced. */
#ifdef BROKEN_RUN_FIRST
	:: up[me] && mine[me] && doing[me] == PREPARING -> start_user_code(me)
#endif
	:: up[me] && mine[me] && doing[me] < EXECUTING ->
		CALL(do_phase, PHASE, me, A(me), doing[me] + 1);
		if
		:: heard && ans == ACCEPTED && doing[me] == CLAIMED -> doing[me] = PREPARING; box[me] = mine[me]
		:: heard && ans == ACCEPTED && doing[me] == PREPARING -> start_user_code(me)
		:: heard && ans == CANCEL -> box[me] = 0; doing[me] = CANCELLED
		:: heard && ans == GONE -> give_up(me)
		:: else
		fi

	/* the commands end */
	:: up[me] && mine[me] && doing[me] == EXECUTING -> box[me] = 0; doing[me] = SUCCESS
	:: up[me] && mine[me] && doing[me] == EXECUTING -> box[me] = 0; doing[me] = FAILED
	/* a second signal, or a refusal to run this job here */
	:: up[me] && mine[me] && doing[me] <= EXECUTING -> box[me] = 0; doing[me] = HAND_OVER

	:: up[me] && mine[me] && doing[me] > EXECUTING ->
		CALL(do_end, END, me, A(me), doing[me]);
		if
		:: heard && ans == ACCEPTED ->
			if
			:: attempt_end[A(me)] != doing[me] || doing[me] <= FAILED && conclusion[JOB(A(me))] != doing[me] -> told_is_stored = false
			:: else
			fi;
			forget(me)
		:: heard && ans == CANCEL -> doing[me] = CANCELLED
		:: heard && ans == GONE -> give_up(me)
		:: else
		fi

	/* A heartbeat that renews changes nothing here: a lease may run out at any time. */
	:: up[me] && mine[me] && doing[me] <= EXECUTING && !TUPLE(me, A(me)) -> give_up(me)
	:: up[me] && mine[me] && doing[me] <= EXECUTING && TUPLE(me, A(me)) && state[JOB(A(me))] == CANCELLING ->
		box[me] = 0; doing[me] = CANCELLED
	/* Its own clock: no heartbeat was answered for TTL - margin. */
	:: up[me] && mine[me] && doing[me] <= EXECUTING -> give_up(me)

	:: up[me] && ended[me] ->
		CALL(do_report, REPORT, me, ended[me] - 1, 0);
		if
		:: heard -> ended[me] = 0
		:: else
		fi

	/* The process ends; its sandbox may or may not outlive it. */
	:: up[me] && crashes < CRASHES ->
		crashes++; up[me] = false; greeted[me] = false; mine[me] = 0; doing[me] = 0; ended[me] = 0; request[me] = 0;
		if
		:: true
		:: box[me] -> box[me] = 0
		fi
	fi;
	done() }
	od
}

/* ---- the clock, the sweep, the network, an operator ---- */

inline cancel(j) {
	if
	:: state[j] == RUNNING -> state[j] = CANCELLING
	:: state[j] == READY ->
		if
		:: queued[j] -> queued[j] = false; reserved--
		:: else
		fi;
#ifdef BROKEN_READY_IS_OVER
		conclude(j, CANCELLED)
#else
		state[j] = CANCELLING;	/* an earlier attempt may not have ended */
		settle(j)
#endif
	:: else
	fi
}

#define IS_FINISHED(j) (state[j] == FINISHED)
#define IS_HELD(j) (state[j] == READY && !queued[j])
#define MAY_EXPIRE(j) (lease[j] && !expired[j])
#define HAS_EXPIRED(j) (lease[j] && expired[j])
#if J == 1
#define ANY_JOB(p) p(0)
#define PICK(p) here = 0
#else
#define ANY_JOB(p) (p(0) || p(1))
#define PICK(p) if :: p(0) -> here = 0 :: p(1) -> here = 1 fi
#endif

active proctype World() {
end:
	do
	:: atomic {
	if
	/* a backoff is over and the tenant has room */
	:: ANY_JOB(IS_HELD) ->
		PICK(IS_HELD);
		queued[here] = true; reserved++
	:: ANY_JOB(MAY_EXPIRE) ->
		PICK(MAY_EXPIRE);
		expired[here] = true
	:: ANY_JOB(HAS_EXPIRED) ->
		PICK(HAS_EXPIRED);
		aa = ATTEMPT(here, epoch[here]);
		rr = attempt_of[aa] - 1;
		end_against(rr, aa, false);
		rr = 0
	:: late_kind ->
		waits = 1;
		if
		:: late_kind == CLAIM -> do_claim(late_runner, late_what, late_more)
		:: late_kind == PHASE -> do_phase(late_runner, late_what, late_more)
		:: late_kind == END -> do_end(late_runner, late_what, late_more)
		:: late_kind == REPORT -> do_report(late_runner, late_what, late_more)
		:: late_kind == OPEN -> do_open(late_runner, late_what, late_more)
		fi;
		waits = 0;
#ifdef BROKEN_GUARD_ONCE
		late_passed = false;
#endif
		late_kind = 0; late_runner = 0; late_what = 0; late_more = 0
	:: cancels < CANCELS && !ALL_JOBS(IS_FINISHED) ->
		cancels++;
		cancel(0)
#if J > 1
		;
		cancel(1)
#endif
#if FENCES > 0
	/* The host is dead or cut off for good: nothing runs there, its leases end. */
	:: fences < FENCES ->
		if
		:: !dead[0] -> rr = 0
#if R > 1
		:: !dead[1] -> rr = 1
#endif
#if R > 2
		:: !dead[2] -> rr = 2
#endif
		fi;
		fences++; dead[rr] = true;
		up[rr] = false; greeted[rr] = false; mine[rr] = 0; doing[rr] = 0; ended[rr] = 0; request[rr] = 0; box[rr] = 0;
		session[rr] = life[rr] + 1;	/* none */
		end_all(rr);
		rr = 0
#endif
	fi;
	done() }
	od
}

#define HAS_WORK(r) (mine[r] || ended[r] || box[r] || occupant[r])

ltl everything_ends { <> (ALL_JOBS(IS_FINISHED) && reserved == 0 && !ANY(HAS_WORK)) }

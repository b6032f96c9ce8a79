/* Bytes of logs: chunks under a fenced lease, group commit, offsets, the archive.

   The attempts of one job, E in number, one after the other, each send a log of C
   chunks to N nodes that share an object store and a database. A node gathers
   what arrives into a group, writes one object, indexes it in one transaction
   that judges each request by itself, then answers with the length that is
   durable without a hole. A runner keeps what is not acknowledged and has several
   chunks in flight, in any order; when it gives up waiting it sends again, through
   any node, while the first request may still be under way. Chunks are one unit
   long: the sequence number of a chunk is its offset + 1.

   Objects that nothing refers to are collected by age. The log of an attempt that
   has ended is rewritten into an archive, which takes the place of its rows.

   Faults are bounded in number, as in lease.pml. */

#ifndef E
#define E 2		/* attempts, at most 2 */
#endif
#ifndef C
#define C 2		/* chunks of a log, at most 3 */
#endif
#ifndef N
#define N 2		/* nodes, at most 2 */
#endif
#ifndef FAULTS
#define FAULTS 2
#endif

#define OBJECTS 6	/* at a time; keys are used again here when nothing knows them any more */
#define CHUNK(e, c) ((e) * C + (c))

/* What has become of a log. */
#define OPEN 0
#define ENDED 1
#define SEALED 2

/* ---- the database ---- */
byte current;		/* the attempt that has, or had, the lease */
bool lease = true;
byte log[E];		/* state */
byte at[E * C];		/* the row of a chunk: object + 1 */
byte next[E];		/* length without a hole */

/* ---- the object store ---- */
bool there[OBJECTS];
bool old[OBJECTS];	/* its key was made longer ago than a segment may live without a row */
byte archive[E];	/* of sealed logs: how many chunks it holds, in truth */

/* ---- nodes ---- */
byte first[N * E];	/* of the chunks of a request that waits in the group, 0 = none */
byte many[N * E];
bool heard[N * E];	/* does its runner still wait for the answer? */
byte object[N];		/* written for the group: + 1 */
#define REQUEST(n, e) ((n) * E + (e))

/* ---- the collector and the archiver ---- */
byte found;		/* object + 1 that had no row when it was looked at */
byte draft;		/* attempt + 1 whose archive is being written */
bool draft_is_whole;
byte draft_length;

/* ---- runners ---- */
byte acked[E];
byte flying[E];		/* bits: chunks that were sent, and not given up */
bool over[E];		/* it sends no more */

byte faults;

/* ---- what must hold ---- */
bool acked_is_stored = true;
bool stored_once = true;
bool no_stale_append = true;
bool refused_is_stale = true;

hidden byte cc, ee, ack, who, rest;
hidden byte stored, refused;

#define IS_THERE(e, c) (at[CHUNK(e, c)] && there[at[CHUNK(e, c)] - 1])
#define REFERS(o) (at[0] == (o) + 1 || REFERS1(o) || REFERS2(o))
#if E * C > 1
#define REFERS1(o) (at[1] == (o) + 1)
#else
#define REFERS1(o) false
#endif
#if E * C == 2
#define REFERS2(o) false
#elif E * C == 3
#define REFERS2(o) (at[2] == (o) + 1)
#elif E * C == 4
#define REFERS2(o) (at[2] == (o) + 1 || at[3] == (o) + 1)
#elif E * C == 6
#define REFERS2(o) (at[2] == (o) + 1 || at[3] == (o) + 1 || at[4] == (o) + 1 || at[5] == (o) + 1)
#endif

#define HELD(o) (object[0] == (o) + 1 || object[N - 1] == (o) + 1)
#define IS_FREE(o) (!there[o] && !HELD(o) && found != (o) + 1 && !REFERS(o))
#define AGES(o) (there[o] && !old[o] && !REFERS(o) && !HELD(o))
#define IS_LATE(o) (there[o] && !old[o] && !REFERS(o) && HELD(o))
#define IS_ORPHAN(o) (there[o] && old[o] && !REFERS(o))
#define ANY_OBJECT(p) (p(0) || p(1) || p(2) || p(3) || p(4) || p(5))
#define PICK(p) cc = 0; do :: !p(cc) -> cc++ :: else -> break od

inline check() {
	ee = 0;
	do
	:: ee < E ->
		cc = 0;
		do
		:: cc < acked[ee] ->
			if
			:: cc >= C || log[ee] != SEALED && !IS_THERE(ee, cc) || log[ee] == SEALED && archive[ee] <= cc -> acked_is_stored = false
			:: else
			fi;
			cc++
		:: else -> break
		od;
		ee++
	:: else -> break
	od;
	ee = 0; cc = 0; ack = 0; who = 0; rest = 0; stored = 0; refused = 0;
	assert(no_stale_append);
	assert(stored_once);
	assert(acked_is_stored);
	assert(refused_is_stale)
}

/* ---- a runner and its shipper ---- */

#define HOLDS(e) (lease && current == (e))
#define BIT(c) (1 << (c))

/* No answer came, or one that asks for the same again. */
inline give_up(n, e) {
	flying[e] = flying[e] & ~(BIT(first[REQUEST(n, e)] - 1) | BIT(first[REQUEST(n, e)] - 2 + many[REQUEST(n, e)]));
	heard[REQUEST(n, e)] = false
}

inline drop(n, e) {
	first[REQUEST(n, e)] = 0;
	many[REQUEST(n, e)] = 0;
	heard[REQUEST(n, e)] = false
}

/* The reply reaches its runner, unless it is lost or nobody waits. */
inline answer(n, e, length, ok) {
	if
	:: heard[REQUEST(n, e)] && !over[e] ->
		if
		:: true ->
			if
			:: ok && length > acked[e] -> acked[e] = length
			:: ok && length <= acked[e]
			:: !ok -> give_up(n, e)
			fi
		:: faults < FAULTS -> faults++; give_up(n, e)
		fi
	:: else
	fi;
	drop(n, e)
}

#define SENDS (current >= me && !over[me])
#define SENDABLE(e, c) ((c) < C && (c) >= acked[e] && !(flying[e] & BIT(c)))

inline post(n, e, c, m) {
	first[REQUEST(n, e)] = c + 1;
	many[REQUEST(n, e)] = m;
	heard[REQUEST(n, e)] = true;
	flying[e] = flying[e] | BIT(c) | BIT(c + m - 1);
#ifdef BROKEN_ACK_ON_ARRIVAL
	if
	:: acked[e] == c -> acked[e] = c + m
	:: else
	fi
#endif
}

/* The end of an attempt ends its log in the same transaction. */
inline end_log() {
	log[current] = ENDED;
	lease = false
}

active [E] proctype Runner() {
	byte me = _pid;
end:
	do
	:: atomic {
	if
	/* one chunk, or two in one request, to any node */
	:: SENDS && !first[REQUEST(0, me)] && SENDABLE(me, 0) -> post(0, me, 0, 1)
	:: SENDS && !first[REQUEST(0, me)] && SENDABLE(me, 1) -> post(0, me, 1, 1)
	:: SENDS && !first[REQUEST(0, me)] && SENDABLE(me, 0) && SENDABLE(me, 1) -> post(0, me, 0, 2)
#if C > 2
	:: SENDS && !first[REQUEST(0, me)] && SENDABLE(me, 2) -> post(0, me, 2, 1)
	:: SENDS && !first[REQUEST(0, me)] && SENDABLE(me, 1) && SENDABLE(me, 2) -> post(0, me, 1, 2)
#endif
#if N > 1
	:: SENDS && !first[REQUEST(1, me)] && SENDABLE(me, 0) -> post(1, me, 0, 1)
	:: SENDS && !first[REQUEST(1, me)] && SENDABLE(me, 1) -> post(1, me, 1, 1)
#if C > 2
	:: SENDS && !first[REQUEST(1, me)] && SENDABLE(me, 2) -> post(1, me, 2, 1)
#endif
#endif
	/* it waits no longer, though the request is under way */
	:: SENDS && faults < FAULTS && heard[REQUEST(0, me)] -> faults++; give_up(0, me)
#if N > 1
	:: SENDS && faults < FAULTS && heard[REQUEST(1, me)] -> faults++; give_up(1, me)
#endif
	/* the end: all is acknowledged, or the time to flush is over */
	:: SENDS && acked[me] == C && HOLDS(me) -> over[me] = true; end_log()
	:: SENDS && faults < FAULTS && HOLDS(me) -> faults++; over[me] = true; end_log()
	/* the lease is found lost */
	:: SENDS && !HOLDS(me) -> over[me] = true
	fi;
	check() }
	od
}

/* ---- a node ---- */

#ifdef BROKEN_NO_FENCE
#define MAY_APPEND(e) (true)
#else
#define MAY_APPEND(e) (HOLDS(e) && log[e] == OPEN)
#endif

/* Indexes the chunks of one request, and says what is contiguous behind it. */
inline index(n, e) {
	if
	:: !(HOLDS(e) && log[e] == OPEN) -> no_stale_append = false
	:: else
	fi;
	cc = first[REQUEST(n, e)] - 1;
	rest = many[REQUEST(n, e)];
	do
	:: rest > 0 ->
		if
		:: !at[CHUNK(e, cc)] -> at[CHUNK(e, cc)] = object[n]; stored = 1
		:: at[CHUNK(e, cc)]	/* known: the same bytes again */
#ifdef BROKEN_NO_SEQUENCE
			-> stored_once = false
#endif
		fi;
		cc++;
		rest--
	:: else -> break
	od;
	do
	:: next[e] < C && at[CHUNK(e, next[e])] -> next[e]++
	:: else -> break
	od
}

#if defined(BROKEN_OFF_BY_ONE)
#define DURABLE(n, e) (next[e] + 1)
#elif defined(BROKEN_ACK_AHEAD)
#define DURABLE(n, e) (first[REQUEST(n, e)] - 1 + many[REQUEST(n, e)] > next[e] -> first[REQUEST(n, e)] - 1 + many[REQUEST(n, e)] : next[e])
#else
#define DURABLE(n, e) next[e]
#endif

/* One request of the group: indexed, and answered behind the commit. */
inline settle(n, e, answered) {
	if
	:: !first[REQUEST(n, e)]
	:: first[REQUEST(n, e)] && MAY_APPEND(e) ->
		index(n, e);
		if
		:: answered -> ack = DURABLE(n, e); answer(n, e, ack, true)
		:: else -> answer(n, e, 0, false)
		fi
	:: first[REQUEST(n, e)] && !MAY_APPEND(e) -> refuse(n, e)
	fi
}

inline refuse(n, e) {
	if
	:: HOLDS(e) && log[e] == OPEN -> refused_is_stale = false
	:: else
	fi;
	over[e] = true;
	drop(n, e)
}

/* Nothing of the group was stored; or nobody will know. */
inline fail(n) {
	who = 0;
	do
	:: who < E ->
		if
		:: first[REQUEST(n, who)] -> answer(n, who, 0, false)
		:: else
		fi;
		who++
	:: else -> break
	od;
	object[n] = 0
}

#define WAITS(n) (first[REQUEST(n, 0)] || first[REQUEST(n, E - 1)])

inline create() {
	PICK(IS_FREE);
	there[cc] = true;
	old[cc] = false;
	object[me] = cc + 1
}

#ifdef BROKEN_NO_AGE
#define MAY_INDEX(o) (true)
#else
#define MAY_INDEX(o) (!old[o])
#endif

/* An object that no row refers to is deleted at once. */
inline finish() {
	if
	:: !stored -> there[object[me] - 1] = false
	:: else
	fi;
	object[me] = 0
}

active [N] proctype Node() {
	byte me = _pid - E;
end:
	do
	:: atomic {
	if
	/* the object: written; failed, not stored; failed, but stored */
	:: WAITS(me) && !object[me] && ANY_OBJECT(IS_FREE) -> create()
	:: WAITS(me) && !object[me] && faults < FAULTS -> faults++; fail(me)
	:: WAITS(me) && !object[me] && faults < FAULTS && ANY_OBJECT(IS_FREE) -> faults++; create(); fail(me)
#ifdef BROKEN_ACK_BEFORE_INDEX
	:: object[me] && faults < FAULTS -> faults++;
		if
		:: first[REQUEST(me, 0)] -> ack = next[0] + many[REQUEST(me, 0)]; answer(me, 0, ack, true)
		:: else
		fi;
		fail(me)
#endif
	/* the transaction: committed; failed, not stored; failed, but stored */
	:: object[me] && MAY_INDEX(object[me] - 1) ->
#ifdef BROKEN_GROUP_FAILS
		if
		:: first[REQUEST(me, 0)] && !MAY_APPEND(0) && first[REQUEST(me, E - 1)] -> refuse(me, 0); refuse(me, E - 1)
		:: else
		fi;
#endif
		settle(me, 0, true);
#if E > 1
		settle(me, 1, true);
#endif
		finish()
	:: object[me] && faults < FAULTS -> faults++; fail(me)
	:: object[me] && MAY_INDEX(object[me] - 1) && faults < FAULTS -> faults++;
		settle(me, 0, false);
#if E > 1
		settle(me, 1, false);
#endif
		finish()
	/* it took too long: the object may have been collected */
	:: object[me] && !MAY_INDEX(object[me] - 1) -> fail(me)
	/* the node ends */
	:: faults < FAULTS && WAITS(me) -> faults++; fail(me)
	fi;
	check() }
	od
}

/* ---- time, the collector, the archiver ---- */

inline write(e) {
	draft = e + 1;
	if
	:: draft_is_whole = true; draft_length = next[e]
	:: faults < FAULTS -> faults++; draft_is_whole = false; draft_length = 0
	fi
}

#ifdef BROKEN_ONE_SEAL_TRY
#define STILL false	/* the archiver gives up */
#else
#define STILL true
#endif

/* What did not verify is thrown away, and the log waits for its archive again. */
inline again() {
	draft = 0;
	draft_length = 0
}

inline seal() {
	archive[draft - 1] = draft_length;
	log[draft - 1] = SEALED;
	cc = 0;
	do
	:: cc < C -> at[CHUNK(draft - 1, cc)] = 0; cc++
	:: else -> break
	od;
	draft = 0; draft_is_whole = false; draft_length = 0
}

active proctype World() {
end:
	do
	:: atomic {
	if
	/* the lease runs out, or its holder hands over: policy grants another attempt */
	:: lease && current < E - 1 -> end_log()
	:: !lease && current < E - 1 -> current++; lease = true
	:: !lease && current == E - 1 && !over[E - 1] -> over[E - 1] = true
	/* an object without a row grows old, is found, is deleted */
	:: ANY_OBJECT(AGES) -> PICK(AGES); old[cc] = true
	:: ANY_OBJECT(IS_LATE) && faults < FAULTS -> faults++; PICK(IS_LATE); old[cc] = true	/* its node is slow */
	:: !found && ANY_OBJECT(IS_ORPHAN) -> PICK(IS_ORPHAN); found = cc + 1
	:: found -> there[found - 1] = false; found = 0
	/* the archive of an ended log: written, verified, put in the rows' place */
	:: log[0] == ENDED && !draft -> write(0)
#if E > 1
	:: log[1] == ENDED && !draft -> write(1)
#endif
	:: draft && draft_is_whole -> seal()
#ifdef BROKEN_SEAL_UNVERIFIED
	:: draft && !draft_is_whole -> seal()
#else
	:: draft && !draft_is_whole && STILL -> again()
#endif
	fi;
	check() }
	od
}

ltl everything_is_sealed { <> (over[0] && over[E - 1] && log[0] == SEALED && log[E - 1] == SEALED) }

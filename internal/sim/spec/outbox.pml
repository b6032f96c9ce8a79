/* Telling the outside: effects outside the database, at least once, after commit.

   S subjects (a commit and a context, say) pass through V states each. Every
   change and the row that says what to tell are one transaction. N nodes relay:
   take a subject for a while, send the state that is the newest then, and delete
   the rows that were there when they looked, once the host has answered. A send
   may fail, may be applied without an answer, and may be applied late; but not
   after the subject may be taken again: an unanswered request is dead before.

   Faults are bounded in number, as in lease.pml. */

#ifndef S
#define S 2		/* subjects, at most 2 */
#endif
#ifndef V
#define V 4		/* states of a subject; the last one is final */
#endif
#ifndef N
#define N 2		/* nodes, at most 2 */
#endif
#ifndef FAULTS
#define FAULTS 4
#endif

/* ---- the database ---- */
byte state[S];
byte rows[S];		/* bits: states that have not been told */
byte taken[S];		/* by node + 1 */

/* ---- nodes ---- */
byte subject[N];	/* + 1 that the node has taken */
byte seen[N];		/* the rows that it has read */
byte newest[N];		/* the state that it sends */
bool asked[N];		/* the request is out */

/* ---- the host outside ---- */
byte shown[S];
byte on_its_way[S];	/* a state in a request that will be applied later, 0 = none */

byte faults;

/* ---- what must hold ---- */
bool told_is_true = true;
bool final_is_kept = true;

hidden byte ss;

inline check() {
	ss = 0;
	do
	:: ss < S ->
		if
		:: shown[ss] > state[ss] -> told_is_true = false
		:: else
		fi;
		if
		:: state[ss] == V && !rows[ss] && !on_its_way[ss] && shown[ss] != V -> final_is_kept = false
		:: else
		fi;
		ss++
	:: else -> break
	od;
	ss = 0;
	assert(told_is_true);
	assert(final_is_kept)
}

#define BIT(v) (1 << (v))

/* ---- the engine ---- */

/* One transaction: the change, and the row. */
inline change(s) {
#ifdef BROKEN_BEFORE_COMMIT
	if
	:: state[s]++; rows[s] = rows[s] | BIT(state[s])
	:: faults < FAULTS -> faults++; shown[s] = state[s] + 1	/* told at once, and then it is not committed */
	fi
#elif defined(BROKEN_TWO_TRANSACTIONS)
	state[s]++;
	if
	:: rows[s] = rows[s] | BIT(state[s])
	:: faults < FAULTS -> faults++	/* the node ended in between */
	fi
#else
	state[s]++;
	rows[s] = rows[s] | BIT(state[s])
#endif
}

active [S] proctype Engine() {
	byte me = _pid;
end:
	do
	:: atomic { state[me] < V -> change(me); check() }
	od
}

/* ---- a relay ---- */

inline take(s) {
	subject[me] = s + 1;
	taken[s] = me + 1;
	seen[me] = rows[s];
#ifdef BROKEN_FIRST_ROW
	newest[me] = 1;
	do
	:: !(rows[s] & BIT(newest[me])) -> newest[me]++
	:: else -> break
	od;
#else
	newest[me] = state[s];
#endif
#ifdef BROKEN_DELETED_FIRST
	rows[s] = rows[s] & ~seen[me]
#endif
}

inline leave() {
	if
#ifdef BROKEN_NO_RELEASE
	:: !asked[me]	/* the node ended, and what it took stays taken */
	:: asked[me] && taken[subject[me] - 1] == me + 1 -> taken[subject[me] - 1] = 0
	:: asked[me] && taken[subject[me] - 1] != me + 1
#else
	:: taken[subject[me] - 1] == me + 1 -> taken[subject[me] - 1] = 0
	:: else
#endif
	fi;
	subject[me] = 0; seen[me] = 0; newest[me] = 0; asked[me] = false
}

/* The host has answered: the rows that were seen are told. */
inline delete() {
#ifdef BROKEN_DELETES_UNSEEN
	rows[subject[me] - 1] = 0
#else
	rows[subject[me] - 1] = rows[subject[me] - 1] & ~seen[me]
#endif
}

/* May a subject be taken? Not while an earlier request for it may still arrive. */
#ifdef BROKEN_TAKEN_TWICE
#define FREE(s) (rows[s])
#else
#define FREE(s) (rows[s] && !taken[s] && !on_its_way[s])
#endif

active [N] proctype Relay() {
	byte me = _pid - S;
end:
	do
	:: atomic {
	if
	:: !subject[me] && FREE(0) -> take(0)
	:: !subject[me] && FREE(S - 1) -> take(S - 1)
	:: subject[me] && !asked[me] ->
		asked[me] = true;
		if
		:: shown[subject[me] - 1] = newest[me]
		:: faults < FAULTS -> faults++; leave()	/* not applied */
		:: faults < FAULTS -> faults++; shown[subject[me] - 1] = newest[me]; leave()	/* applied, no answer */
		:: faults < FAULTS && !on_its_way[subject[me] - 1] -> faults++; on_its_way[subject[me] - 1] = newest[me]; leave()	/* later */
		fi
	:: subject[me] && asked[me] -> delete(); leave()
	/* the node ends, before it asks or behind the answer; what it took is free again in time */
	:: subject[me] && faults < FAULTS -> faults++; leave()
	fi;
	check() }
	od
}

active proctype Network() {
end:
	do
	:: atomic { on_its_way[0] -> shown[0] = on_its_way[0]; on_its_way[0] = 0; check() }
	:: atomic { on_its_way[S - 1] -> shown[S - 1] = on_its_way[S - 1]; on_its_way[S - 1] = 0; check() }
	od
}

ltl final_is_told { <> (state[0] == V && state[S - 1] == V && shown[0] == V && shown[S - 1] == V && !rows[0] && !rows[S - 1]) }

// Package histories checks that the engine's lease calls are linearizable: what
// real concurrent clients see of several server nodes over one real database is
// what some order of the calls, one after the other, would have shown them.
//
// A history is one tenant's: six goroutines are three runners, two are people.
// They submit, claim, renew, set phases, complete, hand over, report slots,
// restart, cancel, retry, let time pass and look, often twice with one request
// ID, sometimes with a lease that is gone or another's. The database fails their
// transactions before and behind the commit, or asks to run them again; callers
// give up while their call is being executed; nodes stop and start. The
// recorded calls are judged by porcupine against the sequential model of this
// package, which is written from the documents and shares no code with engine,
// dag and policy.
//
// Three things are known of the database and not from callers. What the server
// decides by itself, the end of a lease that has run out, is read from the audit
// trail and is an event of the history. Whether a claim, a result, a session
// whose answer was lost took place is read from its rows. And the instant at
// which an accepted call looked at the clock, under its locks, is the one that it
// stored. Where an instant is not stored, the model knows bounds: not before the
// call, nor before that of another transaction that held the same locks earlier.
//
// A call whose outcome stays unknown may have happened at any later time, once,
// or never.
package histories

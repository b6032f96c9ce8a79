// Package sim is the deterministic simulation of a small installation: one
// thread, one seed, explicit time. Modelled runners, operators, networks, clocks
// and objects call the real engine, policy, dag, artifact service and store on
// SQLite in memory, with several server nodes over one database.
//
// A seed is a list of steps. Each step draws what it does from a source of its
// own (seed, number of the step), so that a failing seed can be cut down by
// leaving steps or faults out while it still fails. Faults come in pairs: a
// transaction that failed and was not stored, and one that failed but was; a
// request that was lost, and a reply that was; a node that ended before its
// commit, and one that ended behind it.
//
// After each step the rows it touched are compared with what they were and with
// what callers were told; in full every 25 steps and at the end. Then all faults
// stop and everything has to end in a bounded time.
//
// What is modelled and not real: runners, the network, the object store, and the
// log service, in whose place the statements of the store are called that commit
// its groups.
package sim

// Package sim is the deterministic simulation of a small installation: one
// thread, one seed, explicit time. Modelled runners, operators, networks, clocks
// and objects call the real engine, policy, dag, log service, artifact service and
// store on SQLite in memory, with several server nodes over one database.
//
// A seed is a list of steps. Each step draws what it does from a source of its
// own (seed, number of the step), so that a failing seed can be cut down by
// leaving steps or faults out while it still fails. Faults come in pairs: a
// transaction that failed and was not stored, and one that failed but was; a
// request that was lost, and a reply that was; a node that ended before its
// commit, and one that ended behind it; an object that was not stored, and one
// that was, though the store answered 503.
//
// After each step the rows it touched are compared with what they were and with
// what callers were told; in full every 25 steps and at the end. Then all faults
// stop and everything has to end in a bounded time, every log becomes one archive
// with each byte that was acknowledged, and nothing that no row names is left.
//
// What is modelled and not real: runners, the network and the object store. The
// loops of a server do not run: the simulation makes the calls that they make
// (engine.Sweep, logs.SealEnded, Collect of both byte services), and calls that
// production merges in the background are merged where engine and log service
// ask for it (their Gather).
package sim

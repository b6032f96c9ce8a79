// Package system runs the whole of a small installation in virtual time: the real
// server with its engine, API, logs, artifacts and database, real HTTP, and real
// runners with all that they are made of but an executor, whose steps are scripts
// of this package. It is there for what the deterministic simulation in the folder
// above cannot see, since runners and the network are models there.
//
// A seed is a storm of some virtual minutes: connections are cut in the middle of
// a request or of its answer, or swallow what is sent and stay open; bytes are
// late; machines are cut off for seconds or for longer than a lease; the server
// stops and starts over the same database; runners are stopped, drained and
// started over the same directories; runs are submitted, cancelled and retried.
// Then everything is repaired, all runs have to end, and what the server says of
// them is compared with what the scripts did.
//
// Time is a bubble's of testing/synctest: it passes only while every goroutine
// waits, and minutes cost milliseconds. The order in which goroutines run is not
// part of that: what a seed draws is the same each time, what comes of it is not.
// A seed that fails prints its history; it may take some tries to fail again.
package system

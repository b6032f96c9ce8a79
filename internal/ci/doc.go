// Package ci holds the words of ForgeCI: repositories, runs, jobs, attempts,
// leases, runners, states, conclusions, reasons and the one error type.
//
// It imports the standard library only and every other package may import it.
// The words are the same in the database, on the wire, in the pages and in the
// command line.
package ci

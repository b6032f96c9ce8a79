// Package testkit starts the real things that tests talk to: PostgreSQL
// clusters, an S3 server, the forgeci binary itself, and a TCP proxy that
// breaks connections on request.
//
// Only tests import it. Nothing here skips: what cannot be started fails the
// test with the reason and the remedy, so that a green run means that the real
// thing was there. Everything that is started ends with the test process, also
// when that process is killed.
package testkit

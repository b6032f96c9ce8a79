package testkit

import (
	"net"
	"strconv"
	"time"
)

// OpenPostgres starts a private cluster for a program that is no test; a
// durable one flushes every commit to disk as a production server does. Close
// ends it, and so does the end of the program, however it ends.
func OpenPostgres(durable bool, settings ...string) (*PostgresServer, error) {
	return startPostgres(durable, settings...)
}

// Close stops the server and removes its files.
func (s *PostgresServer) Close() error { return s.end() }

// Version is the version of the server, as "15.18".
func (s *PostgresServer) Version() string { return s.version }

// CreateDatabase creates an empty database and returns its URL. It goes with
// the cluster.
func (s *PostgresServer) CreateDatabase() (string, error) {
	name := "b" + strconv.FormatInt(time.Now().UnixNano(), 36) + randomText(6)
	if err := s.admin(`CREATE DATABASE "` + name + `"`); err != nil {
		return "", err
	}
	return s.url(name), nil
}

// BuildBinary is Binary for a program that is no test. The working directory
// must be inside the module.
func BuildBinary() (string, error) { return builtBinary() }

// FreeAddress is FreeAddr for a program that is no test.
func FreeAddress() (string, error) {
	port, err := freePort()
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), err
}

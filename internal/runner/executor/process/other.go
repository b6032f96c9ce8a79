//go:build !linux

package process

import (
	"context"
	"log/slog"
	"runtime"
	"time"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/runner/executor"
)

// Tracking is the means by which an executor knows which processes are a job's.
type Tracking string

// Options configure an Executor; see the Linux build.
type Options struct {
	Dir        string
	User       *executor.User
	Path       string
	Tracking   Tracking
	DrainGrace time.Duration
}

// Executor stands for the executor where this system has none.
type Executor struct{}

// New fails: class process needs Linux.
func New(Options, *slog.Logger) (*Executor, error) { return nil, errSystem() }

// Class returns ci.IsolationProcess.
func (*Executor) Class() ci.Isolation { return ci.IsolationProcess }

// Check fails.
func (*Executor) Check(context.Context) error { return errSystem() }

// Open fails.
func (*Executor) Open(context.Context, executor.Job) (executor.Sandbox, error) {
	return nil, errSystem()
}

// Sweep fails.
func (*Executor) Sweep(context.Context) ([]protocol.AttemptRef, error) { return nil, errSystem() }

// Close does nothing.
func (*Executor) Close() {}

func errSystem() error {
	return ci.Errorf(ci.ErrIncompatible, "the executor of class process needs Linux, not %s", runtime.GOOS)
}

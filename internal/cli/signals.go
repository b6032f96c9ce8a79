package cli

import (
	"os"
	"os/signal"
	"syscall"
)

// notify listens to the signals that end a daemon.
func notify(c chan<- os.Signal) {
	signal.Notify(c, os.Interrupt, syscall.SIGTERM, syscall.SIGQUIT)
}

func unnotify(c chan<- os.Signal) { signal.Stop(c) }

// isQuit reports whether a signal asks to stop without draining.
func isQuit(s os.Signal) bool { return s == syscall.SIGQUIT }

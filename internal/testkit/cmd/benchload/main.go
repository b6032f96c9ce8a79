// Command benchload measures the product as its users meet it: real processes,
// real databases with their default durability, every result verified.
//
//	benchload [-only NAME,...] [-forgeci BINARY] [-profiles DIR]
//
// It prints one JSON object on one line of standard output for each measurement
// and tells on standard error what it does. It ends with an error when a floor
// is missed or a result is wrong, after all lines are printed. Everything it
// starts ends with it, and its temporary files are removed.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	only := flag.String("only", "", "run only these benches, separated by commas")
	profiles := flag.String("profiles", "", "keep CPU profiles of drain and control_plane, and what each statement cost, in this directory")
	binary := flag.String("forgeci", "", "measure this binary; the default is built from this tree")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	b := &bench{out: os.Stdout, err: os.Stderr, binary: *binary, profiles: *profiles}
	if err := b.run(ctx, strings.FieldsFunc(*only, func(r rune) bool { return r == ',' })); err != nil {
		fmt.Fprintln(os.Stderr, "benchload:", err)
		stop()
		os.Exit(1)
	}
}

// measurement is one bench: what it is called and what it does.
type measurement struct {
	name string
	run  func(*bench, context.Context) error
}

// measurements in the order in which they run: those that want a quiet machine
// come before those that leave much for the disk to do.
func measurements() []measurement {
	return []measurement{
		{"footprint", (*bench).footprint},
		{"first_log", (*bench).firstLog},
		{"submit_wait", (*bench).submitWait},
		{"idle_fleet", (*bench).idleFleet},
		{"control_plane", (*bench).controlPlane},
		{"drain", (*bench).drain},
		{"log_200k", (*bench).log200k},
		{"log_1gib", (*bench).log1GiB},
		{"snapshot_50k", (*bench).snapshot50k},
	}
}

// bench is one run of the program. Only one measurement runs at a time.
type bench struct {
	out, err io.Writer
	binary   string
	profiles string
	dir      string // temporary, removed at the end
	postgres *postgresCluster
	missed   []string // floors
}

func (b *bench) run(ctx context.Context, only []string) (err error) {
	all := measurements()
	for _, name := range only {
		if !slices.ContainsFunc(all, func(m measurement) bool { return m.name == name }) {
			return fmt.Errorf("there is no bench %q", name)
		}
	}
	began := time.Now()
	defer func() { err = errors.Join(err, b.close()) }()
	if err := b.prepare(); err != nil {
		return err
	}
	var failed []error
	for _, m := range all {
		if len(only) > 0 && !slices.Contains(only, m.name) {
			continue
		}
		b.logf("== %s (load %s)", m.name, load())
		start := time.Now()
		if err := m.run(b, ctx); err != nil {
			b.logf("%s: %v", m.name, err)
			failed = append(failed, fmt.Errorf("%s: %w", m.name, err))
		}
		if ctx.Err() != nil {
			return errors.Join(append(failed, ctx.Err())...)
		}
		b.logf("%s took %s", m.name, time.Since(start).Round(100*time.Millisecond))
	}
	b.logf("all took %s", time.Since(began).Round(time.Second))
	for _, m := range b.missed {
		failed = append(failed, errors.New("floor missed: "+m))
	}
	return errors.Join(failed...)
}

// prepare makes what every bench needs.
func (b *bench) prepare() error {
	dir, err := os.MkdirTemp("", "forgeci-bench-")
	if err != nil {
		return err
	}
	b.dir = dir
	b.logf("%s, %d processors, load %s, files in %s", runtime.Version(), runtime.NumCPU(), load(), dir)
	if b.binary == "" {
		b.binary, err = buildBinary()
	}
	return err
}

func (b *bench) close() error {
	var err error
	if b.postgres != nil {
		err = b.postgres.server.Close()
	}
	if b.dir != "" {
		err = errors.Join(err, os.RemoveAll(b.dir))
	}
	return err
}

func (b *bench) logf(format string, args ...any) {
	fmt.Fprintf(b.err, time.Now().Format("15:04:05 ")+format+"\n", args...)
}

// goal is one figure with its bounds.
type goal struct {
	name string
	got  float64
	// target is what is aimed at, floor what must hold.
	target, floor float64
	// atLeast: more is better.
	atLeast bool
}

func (g goal) meets(bound float64) bool {
	if g.atLeast {
		return g.got >= bound
	}
	return g.got <= bound
}

// report prints a measurement's line and compares it with its bounds.
func (b *bench) report(line any, what string, goals ...goal) error {
	text, err := json.Marshal(line)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(b.out, "%s\n", text); err != nil {
		return err
	}
	for _, g := range goals {
		verdict := "target met"
		switch {
		case !g.meets(g.floor):
			verdict = "FLOOR MISSED"
			b.missed = append(b.missed, fmt.Sprintf("%s: %s is %g, must be %g", what, g.name, g.got, g.floor))
		case !g.meets(g.target):
			verdict = "target missed"
		}
		b.logf("%s: %s %g (target %g, floor %g): %s", what, g.name, g.got, g.target, g.floor, verdict)
	}
	return nil
}

// load is the machine's load of the last minute.
func load() string {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	first, _, _ := strings.Cut(string(text), " ")
	return first
}

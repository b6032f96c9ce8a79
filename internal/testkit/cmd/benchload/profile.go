package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"forgeci/internal/testkit"
)

// adminArgs let a process serve its profiles when they are wanted.
func (b *bench) adminArgs(p *string) ([]string, error) {
	if b.profiles == "" {
		return nil, nil
	}
	address, err := testkit.FreeAddress()
	*p = address
	return []string{"--admin-listen", address}, err
}

// profile takes the CPU profiles of the world's processes for a while. The
// function that it returns waits for them.
func (w *world) profile(ctx context.Context, name string, d time.Duration) (wait func()) {
	if w.b.profiles == "" {
		return func() {}
	}
	names := map[string]string{w.server.admin: name + "-server"}
	for i, r := range w.runners {
		names[r.admin] = name + "-runner" + strconv.Itoa(i+1)
	}
	done := make(chan error)
	for address, file := range names {
		go func() { done <- w.b.take(ctx, address, filepath.Join(w.b.profiles, file+".pprof"), d) }()
	}
	return func() {
		for range names {
			if err := <-done; err != nil {
				w.b.logf("profile: %v", err)
			}
		}
	}
}

func (b *bench) take(ctx context.Context, address, file string, d time.Duration) error {
	url := fmt.Sprintf("http://%s/debug/pprof/profile?seconds=%d", address, int(d.Seconds()))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	for try := 0; err != nil && try < 50; try++ { // it may just be starting
		if idle(ctx, 100*time.Millisecond) != nil {
			break
		}
		resp, err = http.DefaultClient.Do(req)
	}
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s %w", url, resp.Status, err)
	}
	return os.WriteFile(file, data, 0o644)
}

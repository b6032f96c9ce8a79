package runner

import (
	"context"
	"log/slog"
	"syscall"
	"time"
)

const (
	defaultMinFree = 256 << 20
	diskEvery      = 5 * time.Second
)

// ready waits while the disk is too full to take a job.
func (r *Runner) ready(ctx context.Context) error {
	warned := false
	for {
		var fs syscall.Statfs_t
		err := syscall.Statfs(r.cfg.DataDir, &fs)
		free := int64(fs.Bavail) * int64(fs.Bsize) //nolint:unconvert // of another type on other systems
		if err != nil || free >= r.cfg.MinFree {
			return nil //nolint:nilerr // a disk that cannot be asked is not known to be full
		}
		if !warned {
			warned = true
			r.log.WarnContext(ctx, "disk nearly full: no job is taken", slog.Int64("free", free), slog.Int64("needed", r.cfg.MinFree))
			if err := r.sources.clear(); err != nil {
				r.log.WarnContext(ctx, "kept sources cannot be removed", slog.Any("error", err))
			}
			continue // that may have been enough
		}
		if err := pause(ctx, diskEvery); err != nil {
			return err
		}
	}
}

package cli

import (
	"context"
	"errors"
	"reflect"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// awaited is a line of --output jsonl. The last line has the result.
type awaited struct {
	Run    *protocol.RunSummary `json:"run,omitempty"`
	Result string               `json:"result,omitempty"` // conclusion of all runs together
	Code   int                  `json:"exit_code"`
}

// awaitRuns waits for several runs at once. It returns all of them, with an error
// as awaitRun does.
func (a *app) awaitRuns(
	ctx context.Context, c *protocol.Client, ids []ci.RunID, w waiting, o output,
) ([]protocol.Run, error) {
	ctx, cancel := within(ctx, w.timeout)
	defer cancel()
	w.timeout = 0
	ctx, abandon := context.WithCancelCause(ctx)
	defer abandon(nil)
	runs := make([]protocol.Run, len(ids))
	done := make(chan error, len(ids))
	for i, id := range ids {
		go func() {
			label := ""
			if len(ids) > 1 {
				label = string(id) + " "
			}
			p := a.newProgress(label)
			defer p.close()
			var last protocol.RunSummary
			run, err := a.awaitRun(ctx, c, id, w, func(r protocol.Run) error {
				if o.form != outputLines {
					return p.changed(r)
				}
				if reflect.DeepEqual(r.RunSummary, last) {
					return nil
				}
				last = r.RunSummary
				return a.printJSONLine(awaited{Run: &r.RunSummary})
			})
			runs[i] = run
			done <- err
		}()
	}
	var first error
	for range ids {
		if err := <-done; err != nil && first == nil {
			first = err
			abandon(err)
		}
	}
	if first != nil {
		a.leaving(first, ids...)
		if _, ok := errors.AsType[stopped](first); ok && o.json() {
			lookOnce(ctx, c, runs)
		}
		if o.form == outputLines {
			if err := a.printJSONLine(awaited{Result: resultOf(first), Code: codeOf(first)}); err != nil {
				return runs, err
			}
		}
	}
	return runs, first
}

// lookOnce reads runs that a wait ended too soon to read, as far as a server answers
// at once.
func lookOnce(ctx context.Context, c *protocol.Client, runs []protocol.Run) {
	ctx, cancel := parting(ctx)
	defer cancel()
	for i := range runs {
		if runs[i].State != "" {
			continue
		}
		if now, err := c.Run(ctx, runs[i].ID); err == nil {
			runs[i] = now
		}
	}
}

// resultOf names the end of a wait that saw no end of its runs.
func resultOf(err error) string {
	stop, ok := errors.AsType[stopped](err)
	switch {
	case !ok && ci.KindOf(err) == ci.ErrNotFound:
		return string(ci.ErrNotFound)
	case !ok:
		return "error"
	case stop.code == exitTimeout:
		return "timeout"
	case stop.code == exitFailed:
		return string(ci.ConclusionFailed)
	default:
		return "interrupted"
	}
}

// unseen ends a command that saw no end of what it waits for: the last line of
// --output jsonl says so.
func (a *app) unseen(err error, o output) error {
	if o.form != outputLines {
		return err
	}
	return errors.Join(err, a.printJSONLine(awaited{Result: resultOf(err), Code: codeOf(err)}))
}

// printAwaited prints finished runs in the chosen form; one alone is not an array.
func (a *app) printAwaited(o output, runs []protocol.Run, single bool) error {
	switch o.form {
	case outputLines:
		code, result := exitSuccess, string(ci.ConclusionSuccess)
		for _, r := range runs {
			if n := codeOfResult(r.Conclusion, r.Reason); n >= code {
				code, result = n, string(r.Conclusion)
			}
		}
		return a.printJSONLine(awaited{Result: result, Code: code})
	case outputJSON:
		if single {
			return a.printJSON(runs[0])
		}
		return a.printJSON(runs)
	default:
		for i, r := range runs {
			if i > 0 {
				a.out.line("")
			}
			a.printRun(r)
		}
		return nil
	}
}

// parting bounds what a command still asks when it does not wait any more.
func parting(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), patience)
}

// cutShort ends a command whose wait saw no end of its runs: the document that was
// asked for has them as they were read last, one that was never read by its ID
// alone, and the code is that of the error.
func (a *app) cutShort(err error, o output, runs []protocol.Run, single bool) error {
	if !o.json() {
		return err
	}
	type unread struct {
		ID ci.RunID `json:"id"`
	}
	docs := make([]any, len(runs))
	for i, r := range runs {
		if docs[i] = r; r.State == "" {
			docs[i] = unread{r.ID}
		}
	}
	if single {
		return errors.Join(err, a.printJSON(docs[0]))
	}
	return errors.Join(err, a.printJSON(docs))
}

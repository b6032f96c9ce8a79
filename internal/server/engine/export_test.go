package engine

import "context"

// RunLine keeps the line to other nodes open, and nothing else of Run: what a poll
// hears then is no sweep's doing.
func (e *Engine) RunLine(ctx context.Context) { e.nodes.run(ctx) }

// OtherNodes reports whether this node knows of another.
func (e *Engine) OtherNodes() bool {
	e.nodes.mu.Lock()
	defer e.nodes.mu.Unlock()
	return e.nodes.others(e.Monotonic())
}

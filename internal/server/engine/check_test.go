package engine_test

// check asserts what must hold of the rows after any history.
func (w *world) check() {
	w.t.Helper()
	bad, err := w.store.Inconsistencies(w.ctx)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, b := range bad {
		w.t.Error("inconsistent: " + b)
	}
	if n, err := w.e.VerifyAudit(w.ctx, w.org); err != nil || n != 0 {
		w.t.Errorf("audit chain breaks at %d: %v", n, err)
	}
}

//go:build !linux

package workspace

// unmountBelow does nothing: only on Linux can a job mount into its workspace.
func unmountBelow(string) error { return nil }

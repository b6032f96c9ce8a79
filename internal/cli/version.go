package cli

import (
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"forgeci/internal/protocol"
)

// build is what forgeci version prints.
type build struct {
	Version  string `json:"version"`
	Commit   string `json:"commit,omitempty"`
	Dirty    bool   `json:"dirty,omitempty"`
	Go       string `json:"go"`
	OS       string `json:"os"`
	Arch     string `json:"arch"`
	Protocol int    `json:"protocol"`
}

func buildInfo() build {
	b := build{Version: "devel", Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH, Protocol: protocol.Version}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		b.Version = v
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Commit = s.Value
		case "vcs.modified":
			b.Dirty = s.Value == "true"
		}
	}
	return b
}

// version is the build's version in one word.
func version() string { return buildInfo().Version }

func (a *app) versionCommand() *cobra.Command {
	var o output
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version of this binary",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			b := buildInfo()
			if o.json() {
				return a.printJSON(b)
			}
			a.out.linef("forgeci %s (protocol %d, %s, %s/%s)", b.Version, b.Protocol, b.Go, b.OS, b.Arch)
			if b.Commit != "" {
				a.out.linef("commit %s", b.Commit)
			}
			return nil
		},
	}
	o.bind(cmd, false)
	return cmd
}

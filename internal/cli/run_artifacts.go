package cli

import (
	"context"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"unicode"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
)

// saveArtifacts puts the artifacts of runs below dir, none over another, and tells
// where each is.
func (a *app) saveArtifacts(ctx context.Context, c *protocol.Client, runs []protocol.Run, dir string) error {
	for _, s := range arrange(runs) {
		get := &artifactsGetConfig{to: filepath.Join(dir, s.place), force: true}
		where, err := a.download(ctx, c, s.Artifact, get)
		if err != nil {
			return err
		}
		a.err.linef("saved %s of %s: %s", where, s.JobName, size(s.Bytes))
	}
	return nil
}

// saved is an artifact and its place below the directory of all.
type saved struct {
	protocol.Artifact
	place string
}

// arrange gives each bound artifact a directory of its own. It is the artifact's
// name; where several have that name, NAME/JOB; and NAME/WORKFLOW/JOB where they
// are of several runs. Names that a file system may take for the same are the
// same here.
func arrange(runs []protocol.Run) []saved {
	count, workflows := map[string]int{}, map[string]map[ci.RunID]bool{}
	for _, r := range runs {
		for _, art := range r.Artifacts {
			if !art.Bound {
				continue
			}
			name := strings.ToLower(art.Name)
			if count[name]++; workflows[name] == nil {
				workflows[name] = map[ci.RunID]bool{}
			}
			workflows[name][r.ID] = true
		}
	}
	var all []saved
	taken := map[string]bool{}
	for _, r := range runs {
		for _, art := range r.Artifacts {
			if !art.Bound {
				continue
			}
			place := filepath.Base(art.Name)
			name := strings.ToLower(art.Name)
			if len(workflows[name]) > 1 {
				place = filepath.Join(place, pathWord(strings.TrimSuffix(path.Base(r.Path), path.Ext(r.Path))))
			}
			if count[name] > 1 {
				place = filepath.Join(place, pathWord(art.JobName))
			}
			free := place
			for n := 2; taken[strings.ToLower(free)]; n++ {
				free = place + "-" + strconv.Itoa(n)
			}
			taken[strings.ToLower(free)] = true
			all = append(all, saved{art, free})
		}
	}
	return all
}

// pathWord makes a name one plain element of a path: "build (linux, 1.10)" is
// build-linux-1.10.
func pathWord(name string) string {
	const most = 60 // of up to 4 bytes: no file system takes more than 255
	var b strings.Builder
	n := 0
	for _, r := range name {
		if !unicode.IsLetter(r) && !unicode.IsDigit(r) && r != '_' && r != '.' {
			r = '-'
		}
		if r == '-' && strings.HasSuffix(b.String(), "-") {
			continue
		}
		if n++; n > most {
			break
		}
		b.WriteRune(r)
	}
	word := strings.Trim(b.String(), "-.")
	if word == "" {
		return "job"
	}
	return word
}

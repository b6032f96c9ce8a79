package process

import (
	"os"
	"os/user"
	"strconv"
	"strings"

	"forgeci/internal/ci"
	"forgeci/internal/runner/executor"
)

// MarkVariable is set for every step to a value that is different for each
// sandbox and means nothing to anyone. Its only use is to find the processes of
// a sandbox whose helper and runner were both killed. A step cannot set it.
const MarkVariable = "FORGECI_SANDBOX"

// environment is the whole environment of a step: the base of the contract, the
// step's own variables, later ones winning, and the mark.
func (e *Executor) environment(job executor.Job, shell, id string, vars []ci.KeyValue) ([]string, error) {
	name := e.userName()
	all := append([]ci.KeyValue{
		{Key: "PATH", Value: e.opts.Path},
		{Key: "HOME", Value: job.Home},
		{Key: "TMPDIR", Value: job.Tmp},
		{Key: "USER", Value: name},
		{Key: "LOGNAME", Value: name},
		{Key: "SHELL", Value: shell},
		{Key: "LANG", Value: "C.UTF-8"},
		{Key: "TERM", Value: "dumb"},
	}, vars...)
	all = append(all, ci.KeyValue{Key: MarkVariable, Value: id})

	at := make(map[string]int, len(all))
	env := make([]string, 0, len(all))
	for _, kv := range all {
		switch {
		case kv.Key == "" || strings.ContainsAny(kv.Key, "=\x00"):
			return nil, ci.Errorf(ci.ErrInvalid, "environment variable %q: a name is not empty and has no = and no NUL byte", kv.Key)
		case strings.Contains(kv.Value, "\x00"):
			return nil, ci.Errorf(ci.ErrInvalid, "environment variable %s: the value holds a NUL byte, which no process can be given", kv.Key)
		}
		entry := kv.Key + "=" + kv.Value
		if i, ok := at[kv.Key]; ok {
			env[i] = entry
			continue
		}
		at[kv.Key] = len(env)
		env = append(env, entry)
	}
	return env, nil
}

// userName is the name of the user that steps run as, or its number.
func (e *Executor) userName() string {
	if e.opts.User != nil {
		if e.opts.User.Name != "" {
			return e.opts.User.Name
		}
		return strconv.Itoa(int(e.opts.User.UID))
	}
	uid := strconv.Itoa(os.Geteuid())
	if u, err := user.LookupId(uid); err == nil {
		return u.Username
	}
	return uid
}

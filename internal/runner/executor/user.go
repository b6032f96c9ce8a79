package executor

import (
	"os/user"
	"strconv"

	"forgeci/internal/ci"
)

// User is who the steps of a job run as when it is not the runner's own user.
type User struct {
	Name     string
	UID, GID uint32
	// Groups are the supplementary groups.
	Groups []uint32
}

// LookupUser finds a user of this machine by name or by number. An unknown user,
// and root, are ci.ErrInvalid: dropping to root drops nothing.
func LookupUser(name string) (*User, error) {
	u, err := user.Lookup(name)
	if err != nil {
		if u, err = user.LookupId(name); err != nil {
			return nil, ci.Errorf(ci.ErrInvalid, "job user %q: no such user on this machine", name).WithCause(err)
		}
	}
	uid, err := number(u.Uid)
	if err != nil {
		return nil, ci.Errorf(ci.ErrInvalid, "job user %q: user ID %q is not a number", name, u.Uid)
	}
	gid, err := number(u.Gid)
	if err != nil {
		return nil, ci.Errorf(ci.ErrInvalid, "job user %q: group ID %q is not a number", name, u.Gid)
	}
	if uid == 0 {
		return nil, ci.Errorf(ci.ErrInvalid, "job user %q is root: name a user without privileges", name)
	}
	ids, err := u.GroupIds()
	if err != nil {
		return nil, ci.Errorf(ci.ErrInvalid, "job user %q: groups cannot be read", name).WithCause(err)
	}
	found := &User{Name: u.Username, UID: uid, GID: gid}
	for _, id := range ids {
		g, err := number(id)
		if err != nil {
			return nil, ci.Errorf(ci.ErrInvalid, "job user %q: group ID %q is not a number", name, id)
		}
		if g != gid {
			found.Groups = append(found.Groups, g)
		}
	}
	return found, nil
}

func number(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err
}

// Package auth says who is asking: it turns a credential into a viewer or a
// runner and refuses the rest.
package auth

import "forgeci/internal/ci"

// Viewer is who reads. Every read of the server takes one, so that visibility
// is a condition of the query and never an afterthought. The zero value sees
// nothing.
type Viewer struct {
	// Org is the organisation whose objects the viewer may see.
	Org ci.OrgID
	// Actor is the name written into audit rows and shown on pages.
	Actor string
	// Admin may act on runners and dead letters.
	Admin bool
}

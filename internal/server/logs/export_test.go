package logs

import "forgeci/internal/server/store"

// Followed reports whether somebody reads the log of an attempt, be it there or not.
func (s *Service) Followed(k store.AttemptKey) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.views[k] != nil && s.views[k].readers > 0
}

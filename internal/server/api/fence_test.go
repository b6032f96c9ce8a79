package api

import (
	"slices"
	"testing"

	"forgeci/internal/protocol"
	"forgeci/internal/server/store"
)

// Every lease route that has an effect names the statements that commit it, and
// each of them holds the fence; no fenced statement belongs to no route.
func TestEveryEffectOfALeaseRouteIsFenced(t *testing.T) {
	t.Parallel()
	effects := map[string][]string{
		protocol.RouteHeartbeat:       {"LeasesRenew"},
		protocol.RoutePhase:           {"AttemptsPhase", "JobsPhase", "LeasesDeadline", "StepsUpsert"},
		protocol.RouteAppendLog:       {"LogsInsert", "LeasesCurrent", "LogExtentsInsert", "LogsAdvance"},
		protocol.RouteComplete:        {"LeasesFence", "StepsUpsert"},
		protocol.RouteHandOver:        {"LeasesFence", "StepsUpsert"},
		protocol.RouteNewArtifact:     {"ArtifactInsert"},
		protocol.RouteSignParts:       {"ArtifactPartsInsert"},
		protocol.RouteSealArtifact:    {"ArtifactSeal"},
		protocol.RouteFetchSource:     nil, // reads only
		protocol.RouteRestoreArtifact: nil, // reads only
	}
	fenced, err := store.Fenced()
	if err != nil {
		t.Fatal(err)
	}
	used := map[string]bool{}
	for _, r := range leaseRoutes((&API{}).Routes()) {
		names, ok := effects[r.Pattern]
		if !ok {
			t.Errorf("lease route %s has no row", r.Pattern)
		}
		for _, n := range names {
			used[n] = true
			if !slices.Contains(fenced, n) {
				t.Errorf("%s commits by %s, which does not hold the fence", r.Pattern, n)
			}
		}
	}
	for _, n := range fenced {
		if !used[n] {
			t.Errorf("the fenced statement %s belongs to no lease route", n)
		}
	}
}

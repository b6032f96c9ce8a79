package api

// artifactRoutes are the lease routes of artifact transfer.
func (a *API) artifactRoutes() []Route { return nil }

package api

import (
	"net/http"
	"reflect"
	"regexp"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"forgeci/internal/protocol"
	"forgeci/internal/server/auth"
)

// OpenAPI renders the table of routes as an OpenAPI 3.1 document; the schemas of
// the documents come from their Go types.
func (a *API) OpenAPI() *huma.OpenAPI {
	reg := huma.NewMapRegistry("#/components/schemas/", schemaName)
	doc := &huma.OpenAPI{
		OpenAPI: "3.1.0",
		Info: &huma.Info{
			Title: "ForgeCI", Version: a.Version,
			Description: "Errors are application/problem+json. Calls that change something may be repeated after a lost reply as their description says.",
		},
		Components: &huma.Components{Schemas: reg, SecuritySchemes: map[string]*huma.SecurityScheme{
			"bearer": {Type: "http", Scheme: "bearer"},
		}},
		Paths: map[string]*huma.PathItem{},
	}
	problem := reg.Schema(reflect.TypeFor[protocol.Problem](), true, "Problem")
	wildcard := regexp.MustCompile(`\{([a-z_]+)\}`)
	for _, r := range a.Routes() {
		method, path, _ := strings.Cut(r.Pattern, " ")
		op := &huma.Operation{
			Method: method, Path: path, Summary: r.Summary, OperationID: operationName(method, path),
			Responses: map[string]*huma.Response{
				"default": {Description: "error", Content: map[string]*huma.MediaType{protocol.MediaProblem: {Schema: problem}}},
			},
		}
		for _, m := range wildcard.FindAllStringSubmatch(path, -1) {
			op.Parameters = append(op.Parameters, &huma.Param{Name: m[1], In: "path", Required: true, Schema: &huma.Schema{Type: "string"}})
		}
		if r.Credential != auth.None {
			op.Security = []map[string][]string{{"bearer": {}}}
			op.Description = "Credential: " + string(r.Credential) + "."
		}
		if r.Lease == LeaseActive || r.Lease == LeaseCancelling {
			op.Parameters = append(op.Parameters, &huma.Param{
				Name: protocol.HeaderLease, In: "header", Required: true,
				Schema: &huma.Schema{Type: "string"}, Description: "run/job/runner/session/lease/epoch",
			})
		}
		if r.In != nil {
			t := reflect.TypeOf(r.In)
			op.RequestBody = &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{
				protocol.MediaJSON: {Schema: reg.Schema(t, true, t.Name())},
			}}
		}
		ok := &huma.Response{Description: "success"}
		if r.Out != nil {
			t := reflect.TypeOf(r.Out)
			ok.Content = map[string]*huma.MediaType{protocol.MediaJSON: {Schema: reg.Schema(t, true, t.Name())}}
		}
		op.Responses["200"] = ok
		item := doc.Paths[path]
		if item == nil {
			item = &huma.PathItem{}
			doc.Paths[path] = item
		}
		switch method {
		case http.MethodGet:
			item.Get = op
		case http.MethodPost:
			item.Post = op
		case http.MethodPut:
			item.Put = op
		}
	}
	return doc
}

// schemaName makes a component name of a Go type, generic ones included.
func schemaName(t reflect.Type, hint string) string {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	name := t.Name()
	if name == "" {
		name = hint
	}
	return strings.NewReplacer("[", "Of", "]", "", "forgeci/internal/protocol.", "", "*", "", "/", "", ".", "").Replace(name)
}

func operationName(method, path string) string {
	words := strings.FieldsFunc(path, func(c rune) bool { return c == '/' || c == '{' || c == '}' || c == '-' || c == '.' })
	return strings.ToLower(method) + "-" + strings.Join(words, "-")
}

func (a *API) openAPI(w http.ResponseWriter, _ *http.Request, _ caller) error {
	b, err := a.OpenAPI().MarshalJSON()
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", protocol.MediaJSON)
	_, _ = w.Write(b)
	return nil
}

package workflow

import (
	"encoding/json"
	"maps"
	"sync"
)

// Schema returns the JSON Schema (draft 2020-12) of workflow files for editors.
// It accepts every file that Parse accepts; what only a program can judge
// (graphs, expressions, limits after expansion) is left to Parse.
func Schema() []byte {
	return append([]byte(nil), schemaOnce()...)
}

var schemaOnce = sync.OnceValue(func() []byte {
	defs := schema{}
	for name, t := range tables() {
		defs[name] = t.schema()
	}
	defs[tPublish].(schema)["anyOf"] = []any{schema{"required": []any{"path"}}, schema{"required": []any{"paths"}}}
	defs[tImage].(schema)["anyOf"] = []any{schema{"required": []any{"ref"}}, schema{"required": []any{"dockerfile"}}}
	root := schema{
		"$schema":     "https://json-schema.org/draft/2020-12/schema",
		"title":       "ForgeCI workflow",
		"description": "A workflow file: .forgeci.yaml or .forgeci/*.yaml",
		"$ref":        "#/$defs/" + tWorkflow,
		"$defs":       defs,
	}
	out, err := json.MarshalIndent(root, "", "  ")
	if err != nil {
		panic("workflow: the schema is not JSON: " + err.Error())
	}
	return append(out, '\n')
})

func (t *table) schema() schema {
	properties := schema{}
	for _, k := range t.keys {
		v := schema{"description": k.doc}
		if missing := t.idle[k.name]; missing != "" {
			v["description"] = k.doc + " Checked, without effect yet: " + missing + "."
		}
		maps.Copy(v, k.value)
		properties[k.name] = v
	}
	s := schema{"type": "object", "properties": properties, "additionalProperties": false}
	if len(t.required) > 0 {
		required := make([]any, len(t.required))
		for i, r := range t.required {
			required[i] = r
		}
		s["required"] = required
	}
	return s
}

func sRef(name string) schema { return schema{"$ref": "#/$defs/" + name} }

// sText is a value that keeps its source text: 3.10 need not be quoted.
func sText() schema { return schema{"type": []any{"string", "number", "boolean"}} }

// sScalar is any single value, also an empty one.
func sScalar() schema { return schema{"type": []any{"string", "number", "boolean", "null"}} }

// sName is a name, quoted or not.
func sName() schema {
	return schema{"type": []any{"string", "number", "boolean"}, "pattern": namePattern}
}

func sBool() schema { return schema{"type": "boolean"} }

func sShell() schema { return schema{"enum": []any{"sh", "bash"}} }

func sPriority() schema {
	return schema{"type": "integer", "minimum": -maxPriority, "maximum": maxPriority}
}

func sDuration() schema {
	return schema{"type": "string", "pattern": `^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$`}
}

func sCondition() schema { return schema{"type": []any{"string", "boolean"}} }

func sEnv() schema {
	return schema{"type": []any{"object", "null"}, "propertyNames": schema{"pattern": envPattern}, "additionalProperties": sScalar()}
}

func sNullOr(s schema) schema { return schema{"anyOf": []any{schema{"type": "null"}, s}} }

func sOneOrMoreOf(s schema) schema {
	return schema{"anyOf": []any{s, schema{"type": "array", "items": s}}}
}

func sOneOrMore() schema { return sOneOrMoreOf(sText()) }

func sConcurrency() schema { return schema{"anyOf": []any{sScalar(), sRef(tConcurrency)}} }

func sRunsOn() schema {
	return schema{"anyOf": []any{sText(), schema{"type": "array", "items": sScalar()}, sRef(tRunsOn)}}
}

func sImage() schema { return schema{"anyOf": []any{sText(), sRef(tImage)}} }

func sIdentity() schema {
	return schema{"anyOf": []any{sText(), schema{"type": "array", "items": sText()}, sRef(tIdentity)}}
}

func sServices() schema {
	return schema{"anyOf": []any{
		schema{"type": "array", "items": sRef(tService)},
		schema{"type": "object", "additionalProperties": schema{"anyOf": []any{sText(), sRef(tService)}}},
	}}
}

func sOn() schema {
	word := schema{"enum": []any{"push", "pull_request", "manual"}}
	return schema{"anyOf": []any{word, schema{"type": "array", "items": word}, sRef(tOn)}}
}

func sJobs() schema {
	listed := schema{"allOf": []any{sRef(tJob), schema{"required": []any{"name"}}}}
	return schema{"anyOf": []any{
		schema{"type": "array", "minItems": 1, "items": listed},
		schema{"type": "object", "minProperties": 1, "propertyNames": schema{"pattern": namePattern}, "additionalProperties": sRef(tJob)},
	}}
}

func sLegs() schema {
	return schema{"type": "array", "items": schema{"type": "object", "propertyNames": schema{"pattern": namePattern}, "additionalProperties": sScalar()}}
}

func sMatrix() schema {
	return schema{
		"type":                 "object",
		"minProperties":        1,
		"propertyNames":        schema{"pattern": namePattern},
		"properties":           schema{"include": sLegs(), "exclude": sLegs()},
		"additionalProperties": schema{"type": "array", "minItems": 1, "items": sScalar()},
	}
}

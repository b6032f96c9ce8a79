package workflow

import (
	"fmt"
	"strings"
)

// bombs are files made to cost a parser or planner time or memory (ATTACKS
// S10). Every one is below the size limit or says so by its name.
func bombs() map[string]string {
	const mib = 1 << 20
	fill := func(prefix, unit, suffix string) string {
		return prefix + strings.Repeat(unit, (mib-len(prefix)-len(suffix))/len(unit)) + suffix
	}
	job := func(body string) string { return "version: 1\njobs:\n  a:\n    steps: [x]\n" + body }
	var laughs strings.Builder
	laughs.WriteString("version: 1\nx0: &x0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]\n")
	for i := range 12 {
		fmt.Fprintf(&laughs, "x%d: &x%d [%s]\n", i+1, i+1, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*x%d, ", i), 10), ", "))
	}
	var merges strings.Builder
	merges.WriteString("version: 1\nm0: &m0 {a: 1}\n")
	for i := range 12 {
		fmt.Fprintf(&merges, "m%d: &m%d {<<: [%s]}\n", i+1, i+1, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*m%d, ", i), 10), ", "))
	}
	var chain strings.Builder
	chain.WriteString("version: 1\nm0: &m0 {a: 1}\n")
	for i := range 3000 {
		fmt.Fprintf(&chain, "m%d: &m%d {<<: *m%d}\n", i+1, i+1, i)
	}
	list := func(n int, f func(int) string) string {
		var b strings.Builder
		for i := range n {
			if i > 0 {
				b.WriteString(", ")
			}
			b.WriteString(f(i))
		}
		return b.String()
	}
	number := func(i int) string { return fmt.Sprint(i) }
	var cycle, clique, manyJobs, conditions, legs, restores strings.Builder
	cycle.WriteString("version: 1\njobs:\n")
	for i := range 1000 {
		fmt.Fprintf(&cycle, "  j%d: {needs: [j%d], steps: [x]}\n", i, (i+1)%1000)
	}
	clique.WriteString("version: 1\njobs:\n")
	for i := range 95 {
		fmt.Fprintf(&clique, "  j%d: {steps: [x], needs: [%s]}\n", i, list(95, func(k int) string { return fmt.Sprintf("j%d", k) }))
	}
	manyJobs.WriteString("version: 1\njobs:\n")
	for i := range 3000 {
		fmt.Fprintf(&manyJobs, "  j%d: {steps: [x]}\n", i)
	}
	conditions.WriteString("version: 1\njobs:\n")
	for i := range 250 {
		fmt.Fprintf(&conditions, "  j%d:\n    if: \"%s1 == %d\"\n    steps: [x]\n", i, strings.Repeat("1 + ", 1000), i)
	}
	legs.WriteString("version: 1\njobs:\n")
	for i := range 300 {
		fmt.Fprintf(&legs, "  j%d: {steps: [x], matrix: {a: [%s], b: [%s]}}\n", i, list(16, number), list(16, number))
	}
	restores.WriteString("version: 1\njobs:\n  p: {steps: [x], artifacts: {publish: [{name: a, path: a}]}}\n")
	fmt.Fprintf(&restores, "  c: {steps: [x], needs: [p], matrix: {a: [%s]}, artifacts: {restore: [%s]}}\n", list(256, number), list(2000, func(int) string { return "{from_job: p, name: a}" }))
	env := func(n int, value string) string {
		var b strings.Builder
		b.WriteString("    env:\n")
		for i := range n {
			fmt.Fprintf(&b, "      V%d: %s\n", i, value)
		}
		return b.String()
	}
	return map[string]string{
		"aliases, exponential":            laughs.String(),
		"merges, exponential":             merges.String(),
		"merges, long chain":              chain.String(),
		"alias of itself":                 "version: 1\njobs: &a [*a]\n",
		"alias inside itself":             "version: 1\njobs: &a {x: {y: {z: *a}}}\n",
		"merge of itself":                 "version: 1\njobs: &a {<<: *a}\n",
		"flow sequences, deep":            fill("version: 1\njobs: ", "[", ""),
		"flow sequences, deep and closed": "version: 1\njobs: " + strings.Repeat("[", 60) + strings.Repeat("]", 60) + "\n",
		"flow mappings, deep":             fill("version: 1\njobs: ", "{a: ", ""),
		"block sequences, deep":           fill("version: 1\njobs: ", "- ", ""),
		"block mappings, deep": "version: 1\njobs:\n" + func() string {
			var b strings.Builder
			for i := range 1000 {
				b.WriteString(strings.Repeat(" ", i+1) + "a:\n")
			}
			return b.String()
		}(),
		"flow sequence, wide":                          fill("version: 1\njobs: [", "a,", "a]\n"),
		"flow sequence of pairs, wide":                 fill("version: 1\njobs: [", ":,", "a]\n"),
		"flow mapping, wide":                           fill("version: 1\njobs: {", "a,", "a}\n"),
		"flow mappings, wide":                          fill("version: 1\njobs: [", "{},", "{}]\n"),
		"block sequence, wide":                         fill("version: 1\njobs:\n", "-\n", ""),
		"block sequences, deep on a line of their own": fill("version: 1\njobs:\n  ", "- ", ""),
		"below the separator limit, mapping":           "version: 1\njobs: {" + strings.Repeat("a,", 79_000) + "a}\n",
		"below the separator limit, keys":              "version: 1\n" + strings.Repeat("? a\n", 79_000),
		"conditions, short": func() string {
			var b strings.Builder
			b.WriteString("version: 1\njobs:\n")
			for i := range 100 {
				fmt.Fprintf(&b, "  j%d: {steps: [%s]}\n", i, list(30, func(k int) string { return fmt.Sprintf("{run: x, if: 1 < %d}", i*1000+k) }))
			}
			return b.String()
		}(),
		"conditions, at the limit": func() string {
			var b strings.Builder
			b.WriteString("version: 1\njobs:\n")
			for i := range 63 {
				fmt.Fprintf(&b, "  j%d:\n    if: \"%s1 == %d\"\n    steps: [x]\n", i, strings.Repeat("1 + ", 500), i)
			}
			return b.String()
		}(),
		"block sequences, wide":            fill("version: 1\njobs:\n", "- - - - - - - - - -\n", ""),
		"block mapping, wide":              fill("version: 1\njobs:\n", " ?\n", ""),
		"same key, repeated":               fill("version: 1\n", "a: 1\n", ""),
		"below the separator limit, pairs": "version: 1\njobs: [" + strings.Repeat(":,", 79_000) + "a]\n",
		"anchors":                          fill("version: 1\njobs:\n", "- &a a\n", ""),
		"comments":                         fill("version: 1\njobs:\n", "#\n", ""),
		"one comment":                      fill("version: 1\njobs: #", "#", "\n"),
		"blank lines":                      fill("version: 1\njobs:\n", "\n", ""),
		"documents":                        fill("version: 1\n", "---\n", ""),
		"directives":                       fill("", "%YAML 1.2\n", ""),
		"tags":                             fill("version: 1\njobs: ", "!!", " a\n"),
		"long plain scalar":                fill("version: 1\nname: ", "a ", "\n"),
		"long plain scalar of lines":       fill("version: 1\nname: a\n", "  a\n", ""),
		"long quoted scalar":               fill("version: 1\nname: \"", "\\u00e9", "\"\n"),
		"long key":                         fill("version: 1\n", "k", ": 1\n"),
		"open quote":                       fill("version: 1\nname: \"", "a ", ""),
		"question marks":                   fill("version: 1\njobs:\n  ", "? ", ""),
		"colons":                           fill("version: 1\njobs: ", ": ", ""),
		"tabs":                             fill("version: 1\njobs:\n", "\t", ""),
		"over the size":                    strings.Repeat("a", mib+1),
		"NUL":                              "version: 1\nname: a\x00b\n",
		"cycle of 1000":                    cycle.String(),
		"clique":                           clique.String(),
		"3000 jobs":                        manyJobs.String(),
		"300 jobs of 256 legs":             legs.String(),
		"matrix, product":                  job("    matrix: {" + list(26, func(i int) string { return string(rune('a'+i)) + ": [0, 1]" }) + "}\n"),
		"matrix, one long axis":            job("    matrix: {a: [" + list(9000, number) + "]}\n"),
		"matrix, many axes":                job("    matrix: {" + list(3000, func(i int) string { return fmt.Sprintf("a%d: [1]", i) }) + "}\n"),
		"matrix, include":                  job("    matrix: {a: [" + list(256, number) + "], include: [" + list(2500, func(i int) string { return fmt.Sprintf("{b: %d, c: %d}", i, i) }) + "]}\n"),
		"matrix, wide include":             job("    matrix: {a: [" + list(256, number) + "], include: [{" + list(5000, func(i int) string { return fmt.Sprintf("k%d: 1", i) }) + "}]}\n"),
		"matrix, exclude":                  job("    matrix: {a: [" + list(256, number) + "], exclude: [" + list(4000, func(i int) string { return fmt.Sprintf("{a: %d}", i%100) }) + "]}\n"),
		"legs times env":                   job("    matrix: {a: [" + list(256, number) + "]}\n" + env(4000, "x")),
		"legs times text":                  job("    matrix: {a: [" + list(256, number) + "]}\n    env: {A: \"" + strings.Repeat("x", 900_000) + "${{ matrix.a }}\"}\n"),
		"legs times script":                "version: 1\njobs:\n  a:\n    matrix: {a: [" + list(256, number) + "]}\n    steps:\n      - |\n        " + strings.Repeat("x", 900_000) + "\n",
		"legs times restores":              restores.String(),
		"interpolations":                   job("    env: {A: \"" + strings.Repeat("${{ inputs.a }}", 60_000) + "\"}\n"),
		"unclosed interpolations":          job("    env: {A: \"" + strings.Repeat("${{", 300_000) + "\"}\n"),
		"conditions, long":                 conditions.String(),
		"condition, over the limit":        job("    if: \"" + strings.Repeat("(", 500_000) + "\"\n"),
		"condition, deep":                  job("    if: \"" + strings.Repeat("(", 2000) + "true" + strings.Repeat(")", 2000) + "\"\n"),
		"condition, nested lists":          job("    if: \"" + strings.Repeat("[", 2000) + strings.Repeat("]", 2000) + " == []\"\n"),
		"condition, nested macros":         job("    if: \"" + strings.Repeat("[1,2].all(x, ", 200) + "true" + strings.Repeat(")", 200) + "\"\n"),
		"pattern, long":                    "version: 1\non: {push: {paths: [\"" + strings.Repeat("*a", 5000) + "\"]}}\njobs: {a: {steps: [x]}}\n",
		"unknown keys, long":               "version: 1\n" + strings.Repeat("k", 500_000) + ": 1\n",
		"unknown needs":                    job("    needs: [" + list(9000, func(i int) string { return fmt.Sprintf("n%d", i) }) + "]\n"),
		"steps":                            "version: 1\njobs:\n  a:\n    steps: [" + list(9000, number) + "]\n",
		"secrets times steps":              "version: 1\njobs:\n  a:\n    secrets: [" + list(9000, func(i int) string { return fmt.Sprintf("S%d", i) }) + "]\n    steps: [" + list(99, number) + "]\n",
		"cron":                             "version: 1\non: {schedule: [{cron: \"" + strings.Repeat("*/1,", 200_000) + "* * * * *\"}]}\njobs: {a: {steps: [x]}}\n",
	}
}

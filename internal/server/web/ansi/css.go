package ansi

import (
	"fmt"
	"math"
	"strings"
)

// Color is a colour in sRGB.
type Color struct{ R, G, B uint8 }

// String returns the colour as CSS writes it.
func (c Color) String() string { return fmt.Sprintf("#%02x%02x%02x", c.R, c.G, c.B) }

// Theme is what the log's colours stand on.
type Theme struct {
	Name       string
	Background Color
	basic      [16]Color
}

// Light is the light theme. Its background is the value of --log in
// static/style.css.
func Light() Theme {
	return Theme{"light", Color{0xf7, 0xf8, 0xf9}, [16]Color{
		{0x24, 0x29, 0x30},
		{0xb4, 0x23, 0x18},
		{0x1d, 0x6f, 0x42},
		{0x8a, 0x59, 0x00},
		{0x1f, 0x5f, 0xbf},
		{0x8b, 0x3a, 0x9c},
		{0x0d, 0x6e, 0x7c},
		{0x58, 0x60, 0x6b},
		{0x6a, 0x72, 0x7d},
		{0xc9, 0x3a, 0x2b},
		{0x1f, 0x7a, 0x3f},
		{0x8a, 0x60, 0x00},
		{0x2a, 0x6d, 0xd0},
		{0x9c, 0x48, 0xae},
		{0x10, 0x75, 0x84},
		{0x3a, 0x41, 0x4a},
	}}
}

// Dark is the dark theme.
func Dark() Theme {
	return Theme{"dark", Color{0x11, 0x14, 0x18}, [16]Color{
		{0x7d, 0x86, 0x92},
		{0xf0, 0x7b, 0x6e},
		{0x6f, 0xc2, 0x8b},
		{0xdd, 0xb1, 0x5c},
		{0x7f, 0xb0, 0xf5},
		{0xcf, 0x97, 0xde},
		{0x6c, 0xc5, 0xd1},
		{0xc3, 0xca, 0xd3},
		{0x8f, 0x98, 0xa4},
		{0xff, 0x94, 0x88},
		{0x8b, 0xdb, 0xa5},
		{0xf0, 0xc9, 0x7c},
		{0x9c, 0xc4, 0xff},
		{0xdf, 0xb0, 0xec},
		{0x88, 0xdb, 0xe6},
		{0xf2, 0xf4, 0xf7},
	}}
}

// palette returns the fixed colour of an index from 16, and for the first 16
// the colours that programs assume.
func palette(i int) Color {
	switch {
	case i < 16:
		return [16]Color{
			{0, 0, 0},
			{0xb0, 0x2a, 0x20},
			{0x1e, 0x7a, 0x45},
			{0xb0, 0x85, 0x10},
			{0x24, 0x5f, 0xb8},
			{0x8d, 0x3c, 0xa0},
			{0x10, 0x78, 0x88},
			{0xd0, 0xd4, 0xd9},
			{0x6b, 0x73, 0x7e},
			{0xf0, 0x6a, 0x5c},
			{0x64, 0xc4, 0x86},
			{0xe8, 0xc0, 0x60},
			{0x70, 0xa8, 0xf5},
			{0xd0, 0x90, 0xe0},
			{0x60, 0xc8, 0xd6},
			{0xff, 0xff, 0xff},
		}[i]
	case i < 232:
		level := func(n int) uint8 {
			if n == 0 {
				return 0
			}
			return uint8(55 + 40*n)
		}
		i -= 16
		return Color{level(i / 36), level(i / 6 % 6), level(i % 6)}
	default:
		g := uint8(8 + 10*(i-232))
		return Color{g, g, g}
	}
}

// Foreground returns the colour in which the palette index is written on the
// theme's background: its own, mixed with black or white as far as needed for a
// contrast of 4.5.
func (t Theme) Foreground(i int) Color {
	c := palette(i)
	if i < 16 {
		c = t.basic[i]
	}
	toward := Color{}
	if luminance(t.Background) < 0.2 {
		toward = Color{255, 255, 255}
	}
	for mix := 0.0; mix <= 1; mix += 0.02 {
		if m := blend(c, toward, mix); Contrast(m, t.Background) >= 4.55 {
			return m
		}
	}
	return toward
}

func blend(a, b Color, part float64) Color {
	f := func(x, y uint8) uint8 { return uint8(math.Round(float64(x)*(1-part) + float64(y)*part)) }
	return Color{f(a.R, b.R), f(a.G, b.G), f(a.B, b.B)}
}

func luminance(c Color) float64 {
	f := func(v uint8) float64 {
		s := float64(v) / 255
		if s <= 0.04045 {
			return s / 12.92
		}
		return math.Pow((s+0.055)/1.055, 2.4)
	}
	return 0.2126*f(c.R) + 0.7152*f(c.G) + 0.0722*f(c.B)
}

// Contrast returns the contrast ratio of two colours as WCAG 2 defines it, 1 to 21.
func Contrast(a, b Color) float64 {
	x, y := luminance(a), luminance(b)
	return (max(x, y) + 0.05) / (min(x, y) + 0.05)
}

// Stylesheet returns the CSS of all classes that spans carry, for both themes
// by light-dark(). A foreground on a background that the program chose is
// written in the program's own colour.
func Stylesheet() string {
	var b strings.Builder
	lightTheme, darkTheme := Light(), Dark()
	for i := range 256 {
		light, dark, own := lightTheme.Foreground(i), darkTheme.Foreground(i), palette(i)
		on := Color{0, 0, 0}
		if Contrast(own, on) < Contrast(own, Color{255, 255, 255}) {
			on = Color{255, 255, 255}
		}
		fmt.Fprintf(&b, ".f%d{color:light-dark(%s,%s)}.k.f%d{color:%s}.b%d{background:%s;color:%s}\n", i, light, dark, i, own, i, own, on)
	}
	b.WriteString(".bx{background:var(--ink);color:var(--log)}.k.fx{color:var(--log)}\n")
	b.WriteString(".bo{font-weight:700}.di{opacity:.75}.it{font-style:italic}.un{text-decoration:underline}.st{text-decoration:line-through}.un.st{text-decoration:underline line-through}\n")
	return b.String()
}

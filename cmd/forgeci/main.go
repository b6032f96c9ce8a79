// Command forgeci is the whole product: server, runner and client.
package main

import (
	"context"
	"os"

	"forgeci/internal/cli"
)

func main() { os.Exit(cli.Main(context.Background(), cli.System())) }

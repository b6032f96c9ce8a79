// Command forgeci is the whole product: server, runner and client.
package main

func main() {}

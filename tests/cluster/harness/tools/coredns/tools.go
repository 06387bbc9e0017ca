//go:build tools

// Package tools names the program of CoreDNS that the harness runs.
package tools

import _ "github.com/coredns/coredns"

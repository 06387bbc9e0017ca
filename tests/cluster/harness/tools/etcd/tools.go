//go:build tools

// Package tools names the program of etcd that the harness runs.
package tools

import _ "go.etcd.io/etcd/server/v3"

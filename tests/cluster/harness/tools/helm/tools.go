//go:build tools

// Package tools names the program of Helm that the harness runs.
package tools

import _ "helm.sh/helm/v3/cmd/helm"

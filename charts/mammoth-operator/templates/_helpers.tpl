{{- define "mammoth.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "mammoth.selector" -}}
app.kubernetes.io/name: mammoth-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "mammoth.labels" -}}
{{ include "mammoth.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: mammoth
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "mammoth.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "mammoth.fullname" .) .Values.serviceAccount.name }}
{{- else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "mammoth.lease" -}}
{{ default (include "mammoth.fullname" .) .Values.lease.name }}
{{- end }}

{{- define "mammoth.image" -}}
{{ .Values.image.repository }}
{{- if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ default .Chart.AppVersion .Values.image.tag }}{{ end }}
{{- end }}

{{- /* What the operator does with the objects of the namespaces that it serves. */}}
{{- define "mammoth.rules" -}}
- apiGroups: [mammoth.dev]
  resources: [mammothdeployments]
  verbs: [get, list, watch, patch]
- apiGroups: [mammoth.dev]
  resources: [mammothdeployments/status]
  verbs: [patch]
- apiGroups: [mammoth.dev]
  resources: [mammothdeployments/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [controllerrevisions, deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps, serviceaccounts, services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [get, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors, servicemonitors]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}

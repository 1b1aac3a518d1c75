{{/* The longest name that KubeRay takes for a RayCronJob and its like is 36 characters. */}}
{{- define "raylm.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := default (ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name)) .Values.fullnameOverride -}}
{{- $full | trunc 30 | trimSuffix "-" -}}
{{- end }}

{{- define "raylm.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{ include "raylm.selector" . }}
{{- end }}

{{- define "raylm.selector" -}}
app.kubernetes.io/name: raylm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "raylm.image" -}}
{{- $tag := default .Chart.AppVersion .Values.image.tag -}}
{{- if and .Values.image.digest (not .Values.image.tag) -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else if .Values.image.digest -}}
{{ .Values.image.repository }}:{{ $tag }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ $tag }}
{{- end -}}
{{- end }}

{{/* (dict "root" $ "role" "head" or "worker") */}}
{{- define "raylm.serviceAccount" -}}
{{- $account := .root.Values.serviceAccount -}}
{{- $name := default (ternary (include "raylm.fullname" .root) "default" $account.create) $account.name -}}
{{- if and $account.create (eq .role "head") -}}{{ $name }}-head{{- else -}}{{ $name }}{{- end -}}
{{- end }}

{{- define "raylm.claim" -}}
{{ default (printf "%s-models" (include "raylm.fullname" .)) .Values.models.volume.claimName }}
{{- end }}

{{/* A word for a shell. */}}
{{- define "raylm.word" -}}
'{{ . | toString | replace "'" "'\\''" }}'
{{- end }}

{{/* Says "yes" where an upgrade moves traffic from cluster to cluster by and by, through a Gateway that KubeRay makes. */}}
{{- define "raylm.incremental" -}}
{{- if eq .Values.service.upgrade "NewClusterWithIncrementalUpgrade" -}}yes{{- end -}}
{{- end }}

{{/* The Service that answers inside Kubernetes. With the Gateway there is one a cluster, and its name changes. */}}
{{- define "raylm.serviceName" -}}
{{ include "raylm.fullname" . }}-{{ ternary "head" "serve" (ne (include "raylm.incremental" .) "") }}-svc
{{- end }}

{{- define "raylm.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.security.runAsUser }}
runAsUser: {{ int64 . }}
{{- end }}
{{- with .Values.security.runAsGroup }}
runAsGroup: {{ int64 . }}
{{- end }}
{{- with .Values.security.fsGroup }}
fsGroup: {{ int64 . }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "raylm.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* A pod. (dict "root" $ "workload" "service" or "batch" "role" "head" or "worker" "group" the values of its group) */}}
{{- define "raylm.pod" -}}
{{- $values := .root.Values -}}
{{- $serves := eq .workload "service" -}}
metadata:
  # Not the chart's version: a new label would be a new cluster.
  labels:
    {{- include "raylm.selector" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .workload }}-{{ .role }}
  {{- with .group.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "raylm.serviceAccount" . }}
  automountServiceAccountToken: {{ and (eq .role "head") $values.autoscaler.enabled }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- if $serves }}
  terminationGracePeriodSeconds: {{ include "raylm.graceSeconds" .root | trim }}
  {{- end }}
  securityContext: {{- include "raylm.podSecurity" .root | nindent 4 }}
  {{- with include "raylm.placement" . | trim }}{{ . | nindent 2 }}{{ end }}
  {{- with include "raylm.fetchContainers" .root | trim }}
  initContainers: {{- . | nindent 4 }}
  {{- end }}
  containers:
    - {{ include "raylm.container" . | indent 6 | trim }}
  volumes: {{- include "raylm.volumes" (dict "root" .root "workload" .workload "sharedMemory" .group.sharedMemory) | nindent 4 }}
{{- end }}

{{- define "raylm.container" -}}
{{- $values := .root.Values -}}
name: ray-{{ .role }}
image: {{ include "raylm.image" .root }}
imagePullPolicy: {{ $values.image.pullPolicy }}
ports:
  {{- if eq .role "head" }}
  - {name: gcs-server, containerPort: 6379}
  - {name: dashboard, containerPort: 8265}
  {{- end }}
  - {name: metrics, containerPort: 8080}
  {{- if eq .workload "service" }}
  - {name: serve, containerPort: {{ $values.service.port }}}
  {{- end }}
env: {{- include "raylm.env" . | nindent 2 }}
{{- with $values.envFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
resources: {{- include "raylm.resources" .group | nindent 2 }}
securityContext: {{- include "raylm.containerSecurity" .root | nindent 2 }}
{{ include "raylm.probes" . }}
{{- if eq .workload "service" }}
lifecycle:
  preStop:
    exec:
      command: {{- include "raylm.preStop" . | nindent 8 }}
{{- end }}
volumeMounts: {{- include "raylm.mounts" . | nindent 2 }}
{{- end }}

{{- define "raylm.env" -}}
{{- $values := .root.Values -}}
{{- $env := dict "HOME" "/home/raylm" "RAY_AUTH_MODE" $values.auth.mode -}}
{{- if eq .workload "service" -}}
{{- $_ := set $env "RAY_SERVE_ENABLE_HA_PROXY" (ternary "1" "0" $values.service.haProxy) -}}
{{- /* The application on one event loop with its HTTP server, as `raylm serve` has it. */ -}}
{{- $_ := set $env "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD" "0" -}}
{{- $_ := set $env "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP" "0" -}}
{{- $_ := set $env "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS" "1" -}}
{{- $_ := set $env "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER" "2s" -}}
{{- /* A change of ingresses makes a new HAProxy; streams of the one before may go on for so long. */ -}}
{{- $_ := set $env "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S" "3600" -}}
{{- $_ := set $env "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S" (include "raylm.releaseSeconds" .root) -}}
{{- end -}}
{{- $lines := list -}}
{{- range $name, $source := dict "RAY_AUTH_MODE" "auth.mode" "RAY_SERVE_ENABLE_HA_PROXY" "service.haProxy" "HOME" "the volume of the home" -}}
{{- if hasKey $values.env $name -}}{{- fail (printf "env.%s is not to be set: it comes from %s" $name $source) -}}{{- end -}}
{{- end -}}
{{- range $name, $value := merge (dict) $values.env $env -}}
{{- $lines = append $lines (printf "- {name: %s, value: %q}" $name (toString $value)) -}}
{{- end -}}
{{ join "\n" $lines }}
{{- end }}

{{- define "raylm.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .gpus -}}
{{- $gpu := dict (default "nvidia.com/gpu" .gpuResource) (int .gpus) -}}
{{- $_ := set $resources "requests" (merge $gpu (default dict $resources.requests)) -}}
{{- $_ := set $resources "limits" (merge $gpu (default dict $resources.limits)) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end }}

{{/* Ray's node must live; a worker of a service takes traffic when its proxy, or every model, is ready. */}}
{{- define "raylm.probes" -}}
{{- $node := "httpGet: {path: /api/healthz, port: 52365}" -}}
startupProbe:
  {{ $node }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 60
livenessProbe:
  {{ $node }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
readinessProbe:
  {{- if and (eq .workload "service") (eq .role "worker") }}
  httpGet: {path: {{ ternary "/ready" "/-/healthz" (eq .root.Values.readiness "model") }}, port: serve}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 1
  {{- else }}
  {{ $node }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
  {{- end }}
{{- end }}

{{/*
A worker has Ray drain its node: Serve starts replacements elsewhere, then stops the replicas here, which finish their
requests; the emptied node ends by itself, and the hook with it. The head cannot be drained. It stays while requests that
came through it end, and while the workers of a cluster that goes as a whole drain.
*/}}
{{- define "raylm.preStop" -}}
{{- $seconds := include "raylm.drainSeconds" .root | trim -}}
- bash
- -c
{{- if eq .role "worker" }}
- >-
  ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message 'the pod is being deleted'
  --deadline-remaining-seconds {{ $seconds }} && exec sleep {{ $seconds }}
{{- else }}
- exec sleep {{ $seconds }}
{{- end }}
{{- end }}

{{- define "raylm.placement" -}}
{{- $values := .root.Values -}}
{{- with .group.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := default list .group.tolerations -}}
{{- if .group.gpus -}}
{{- $tolerations = prepend $tolerations (dict "key" (default "nvidia.com/gpu" .group.gpuResource) "operator" "Exists" "effect" "NoSchedule") -}}
{{- end }}
{{- with $tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .group.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and $values.topologySpread.enabled (eq .role "worker") }}
topologySpreadConstraints:
  - maxSkew: {{ $values.topologySpread.maxSkew }}
    topologyKey: {{ $values.topologySpread.topologyKey }}
    whenUnsatisfiable: {{ $values.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "raylm.selector" .root | nindent 8 }}
        ray.io/group: {{ .group.name }}
{{- end }}
{{- end }}

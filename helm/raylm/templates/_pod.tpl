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

{{/*
A pod, with the podTemplates of all pods and of its group merged over it, where there are any.
(dict "root" $ "workload" "service" or "batch" "role" "head" or "worker" "group" the values of its group)
*/}}
{{- define "raylm.pod" -}}
{{- $pod := include "raylm.chartsPod" . -}}
{{- range $template := list .root.Values.podTemplate .group.podTemplate -}}
{{- if $template -}}
{{- $pod = include "raylm.merged" (dict "base" (fromYaml $pod) "over" $template) | fromYaml | dig "value" (dict) | toYaml -}}
{{- end -}}
{{- end -}}
{{- $pod -}}
{{- end }}

{{/*
A value merged over another, as `kubectl patch` does: maps by key, lists of maps by name, mountPath or containerPort; other
lists and everything else in place of what was there. (dict "base" x "over" y), under the key `value`.
*/}}
{{- define "raylm.merged" -}}
{{- $value := .over -}}
{{- if and (kindIs "map" .base) (kindIs "map" .over) -}}
{{- $value = deepCopy .base -}}
{{- range $key, $part := .over -}}
{{- if hasKey $value $key -}}
{{- $part = (include "raylm.merged" (dict "base" (get $value $key) "over" $part) | fromYaml).value -}}
{{- end -}}
{{- $_ := set $value $key $part -}}
{{- end -}}
{{- else if and (kindIs "slice" .base) (kindIs "slice" .over) -}}
{{- $names := dict "of" list -}}
{{- range $list := list .base .over -}}{{- range $list -}}
{{- $_ := set $names "of" (append $names.of (include "raylm.nameInList" .)) -}}
{{- end -}}{{- end -}}
{{- if not (has "" $names.of) -}}
{{- $over := .over -}}
{{- $value = list -}}
{{- range $one := .base -}}
{{- range $other := $over -}}
{{- if eq (include "raylm.nameInList" $one) (include "raylm.nameInList" $other) -}}
{{- $one = (include "raylm.merged" (dict "base" $one "over" $other) | fromYaml).value -}}
{{- end -}}
{{- end -}}
{{- $value = append $value $one -}}
{{- end -}}
{{- $had := slice $names.of 0 (len .base) -}}
{{- range $other := $over -}}
{{- if not (has (include "raylm.nameInList" $other) $had) -}}{{- $value = append $value $other -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml (dict "value" $value) -}}
{{- end }}

{{- define "raylm.nameInList" -}}
{{- if kindIs "map" . -}}
{{- if hasKey . "mountPath" -}}{{ .mountPath }}
{{- else if hasKey . "name" -}}{{ .name }}
{{- else if hasKey . "containerPort" -}}{{ toString .containerPort }}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "raylm.chartsPod" -}}
{{- $values := .root.Values -}}
{{- $serves := eq .workload "service" -}}
metadata:
  # Not the chart's version: a new label would be a new cluster.
  labels:
    {{- with .group.labels }}{{ toYaml . | nindent 4 }}{{ end }}
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
  {{- with default $values.priorityClassName .group.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .group.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .group.schedulerName }}
  schedulerName: {{ . }}
  {{- end }}
  {{- if $serves }}
  terminationGracePeriodSeconds: {{ include "raylm.podTimes" . | fromYaml | dig "grace" 0 }}
  {{- end }}
  securityContext: {{- include "raylm.podSecurity" .root | nindent 4 }}
  {{- with include "raylm.placement" . | trim }}{{ . | nindent 2 }}{{ end }}
  {{- with include "raylm.initContainers" . | trim }}
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
resources: {{- include "raylm.resources" . | nindent 2 }}
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
{{- if include "raylm.hasFront" .root -}}
{{- $_ := set $env "RAY_SERVE_HAPROXY_BINARY_PATH" (include "raylm.frontProgram" .root) -}}
{{- end -}}
{{- end -}}
{{- $lines := list -}}
{{- range $name, $source := dict "RAY_AUTH_MODE" "auth.mode" "RAY_SERVE_ENABLE_HA_PROXY" "service.haProxy" "HOME" "the volume of the home" -}}
{{- if hasKey $values.env $name -}}{{- fail (printf "env.%s is not to be set: it comes from %s" $name $source) -}}{{- end -}}
{{- end -}}
{{- range $name, $value := merge (dict) $values.env $env -}}
{{- $line := printf "value: %q" (toString $value) -}}
{{- if kindIs "map" $value -}}{{- $line = printf "valueFrom: %s" (toJson $value) -}}{{- end -}}
{{- $lines = append $lines (printf "- {name: %s, %s}" $name $line) -}}
{{- end -}}
{{ join "\n" $lines }}
{{- end }}

{{/* A worker that has files of models of its own is placed where there is room for them. */}}
{{- define "raylm.resources" -}}
{{- $resources := deepCopy .group.resources -}}
{{- $models := .root.Values.models -}}
{{- if and (eq .role "worker") (eq $models.volume.type "emptyDir") $models.fetch -}}
{{- $_ := set $resources "requests" (merge $resources.requests (dict "ephemeral-storage" $models.volume.size)) -}}
{{- end -}}
{{- if .group.gpus -}}
{{- $gpu := dict (default "nvidia.com/gpu" .group.gpuResource) (int .group.gpus) -}}
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
  httpGet: {path: {{ ternary "/ready" "/-/healthz" (eq .root.Values.readiness "model") }}, port: serve{{ if .root.Values.tls.secretName }}, scheme: HTTPS{{ end }}}
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
came through it end, and while the workers of a cluster that goes as a whole drain. A pod that goes because its Ray does
not answer has nothing to wait for.
*/}}
{{- define "raylm.preStop" -}}
{{- $seconds := include "raylm.podTimes" . | fromYaml | dig "drain" 0 -}}
- bash
- -c
- |
  timeout 5 bash -c 'exec 3<>/dev/tcp/127.0.0.1/52365 && printf "GET /api/healthz HTTP/1.0\r\n\r\n" >&3 && head -n 1 <&3 | grep -q " 200 "' || exit 0
  {{- if eq .role "worker" }}
  ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message 'the pod is being deleted' --deadline-remaining-seconds {{ $seconds }} && exec sleep {{ $seconds }}
  {{- else }}
  exec sleep {{ $seconds }}
  {{- end }}
{{- end }}

{{/* Tolerations: of the group; of GPUs, which MIG's devices are too; and how long a lost node may take to come back. */}}
{{- define "raylm.tolerations" -}}
{{- $given := default list .group.tolerations -}}
{{- $tolerations := list -}}
{{- if .group.gpus -}}
{{- $resource := default "nvidia.com/gpu" .group.gpuResource -}}
{{- range uniq (list (ternary "nvidia.com/gpu" $resource (hasPrefix "nvidia.com/" $resource)) $resource) -}}
{{- $tolerations = append $tolerations (dict "key" . "operator" "Exists" "effect" "NoSchedule") -}}
{{- end -}}
{{- end -}}
{{- $tolerations = concat $tolerations $given -}}
{{- $seconds := int64 .root.Values.lostNodeSeconds -}}
{{- range $key := list "node.kubernetes.io/not-ready" "node.kubernetes.io/unreachable" -}}
{{- $said := false -}}
{{- range $given -}}{{- if eq (default "" .key) $key -}}{{- $said = true -}}{{- end -}}{{- end -}}
{{- if not $said -}}
{{- $tolerations = append $tolerations (dict "key" $key "operator" "Exists" "effect" "NoExecute" "tolerationSeconds" $seconds) -}}
{{- end -}}
{{- end -}}
{{ toYaml $tolerations }}
{{- end }}

{{- define "raylm.placement" -}}
{{- $values := .root.Values -}}
{{- with .group.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
tolerations: {{- include "raylm.tolerations" . | nindent 2 }}
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

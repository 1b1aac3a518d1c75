{{/* A RayCluster's spec. (dict "root" $ "workload" "service" or "batch" "groups" worker groups) */}}
{{- define "raylm.cluster" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $workload := .workload -}}
rayVersion: {{ $values.rayVersion | quote }}
authOptions:
  mode: {{ $values.auth.mode }}
  {{- with $values.auth.secretName }}
  secretName: {{ . }}
  {{- end }}
{{- with $values.gcsFaultTolerance }}
{{- if eq .backend "redis" }}
gcsFaultToleranceOptions:
  redisAddress: {{ .redis.address | quote }}
  {{- with .redis.username }}
  redisUsername: {value: {{ . | quote }}}
  {{- end }}
  {{- with .redis.secretName }}
  redisPassword:
    valueFrom:
      secretKeyRef: {name: {{ . }}, key: {{ $values.gcsFaultTolerance.redis.secretKey }}}
  {{- end }}
{{- else if eq .backend "rocksdb" }}
gcsFaultToleranceOptions:
  backend: rocksdb
  storage:
    size: {{ .rocksdb.size }}
    {{- with .rocksdb.storageClassName }}
    storageClassName: {{ . }}
    {{- end }}
{{- end }}
{{- end }}
enableInTreeAutoscaling: {{ $values.autoscaler.enabled }}
{{- if $values.autoscaler.enabled }}
autoscalerOptions:
  version: {{ $values.autoscaler.version }}
  upscalingMode: {{ $values.autoscaler.upscalingMode }}
  idleTimeoutSeconds: {{ int64 $values.autoscaler.idleTimeoutSeconds }}
  imagePullPolicy: {{ $values.image.pullPolicy }}
  resources: {{- toYaml $values.autoscaler.resources | nindent 4 }}
  securityContext: {{- include "raylm.containerSecurity" $root | nindent 4 }}
  env:
    - {name: HOME, value: /home/raylm}
    - {name: RAY_AUTH_MODE, value: {{ $values.auth.mode }}}
  volumeMounts: {{- include "raylm.scratchMounts" $root | nindent 4 }}
{{- end }}
headGroupSpec:
  rayStartParams:
    # Replicas and jobs run on workers.
    num-cpus: "0"
  template: {{- include "raylm.pod" (dict "root" $root "workload" $workload "role" "head" "group" $values.head) | nindent 4 }}
workerGroupSpecs:
  {{- range .groups }}
  - groupName: {{ .name }}
    replicas: {{ dig "replicas" .minReplicas . }}
    minReplicas: {{ .minReplicas }}
    maxReplicas: {{ .maxReplicas }}
    numOfHosts: {{ default 1 .hosts }}
    {{- with .rayLabels }}
    labels: {{- toYaml . | nindent 6 }}
    {{- end }}
    rayStartParams: {}
    template: {{- include "raylm.pod" (dict "root" $root "workload" $workload "role" "worker" "group" .) | nindent 6 }}
  {{- end }}
{{- end }}

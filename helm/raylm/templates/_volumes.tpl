{{/* (dict "root" $ "workload" "service" or "batch" "sharedMemory" quantity) */}}
{{- define "raylm.volumes" -}}
{{- $values := .root.Values -}}
{{- $volume := $values.models.volume -}}
- name: shared-mem
  emptyDir: {medium: Memory, sizeLimit: {{ .sharedMemory }}}
- name: tmp
  emptyDir: {sizeLimit: {{ $values.scratch.tmp }}}
- name: home
  emptyDir: {sizeLimit: {{ $values.scratch.home }}}
- name: models
  {{- if eq $volume.type "emptyDir" }}
  emptyDir: {{ if $volume.size }}{sizeLimit: {{ $volume.size }}}{{ else }}{}{{ end }}
  {{- else if eq $volume.type "hostPath" }}
  hostPath: {path: {{ $volume.hostPath }}, type: Directory}
  {{- else if eq $volume.type "image" }}
  image: {reference: {{ $volume.image }}, pullPolicy: {{ $values.image.pullPolicy }}}
  {{- else }}
  persistentVolumeClaim:
    claimName: {{ include "raylm.claim" .root }}
  {{- end }}
{{- if and $values.apiKeys.secretName (eq .workload "service") }}
- name: api-keys
  secret:
    secretName: {{ $values.apiKeys.secretName }}
    items:
      - {key: {{ $values.apiKeys.secretKey | quote }}, path: api-keys}
{{- end }}
{{- if and $values.apiKeys.tenantsSecretName (eq .workload "service") }}
- name: tenants
  secret:
    secretName: {{ $values.apiKeys.tenantsSecretName }}
    items:
      - {key: {{ $values.apiKeys.tenantsSecretKey | quote }}, path: tenants.yaml}
{{- end }}
{{- if and $values.tls.secretName (eq .workload "service") }}
- name: tls
  secret: {secretName: {{ $values.tls.secretName }}, defaultMode: 0440}
{{- end }}
{{- with $values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "raylm.scratchMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/raylm}
{{- end }}

{{- define "raylm.apiKeysFile" -}}/etc/raylm/api-keys{{- end }}
{{- define "raylm.tenantsFile" -}}/etc/raylm-tenants/tenants.yaml{{- end }}
{{- define "raylm.tlsFolder" -}}/etc/raylm-tls{{- end }}

{{/* (dict "root" $ "workload" "service" or "batch") */}}
{{- define "raylm.mounts" -}}
- {name: shared-mem, mountPath: /dev/shm}
{{ include "raylm.scratchMounts" .root }}
- {name: models, mountPath: /models, readOnly: true}
{{- if and .root.Values.apiKeys.secretName (eq .workload "service") }}
# The folder: a file that is mounted alone never changes.
- {name: api-keys, mountPath: {{ dir (include "raylm.apiKeysFile" .root) }}, readOnly: true}
{{- end }}
{{- if and .root.Values.apiKeys.tenantsSecretName (eq .workload "service") }}
- {name: tenants, mountPath: {{ dir (include "raylm.tenantsFile" .root) }}, readOnly: true}
{{- end }}
{{- if and .root.Values.tls.secretName (eq .workload "service") }}
- {name: tls, mountPath: {{ include "raylm.tlsFolder" .root }}, readOnly: true}
{{- end }}
{{- with .root.Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/*
Models come before Ray starts: from a claim, into which one Job fetches them, or each pod fetches its own. The head reads
no weights, only what tokenizers and configurations are (or all of it, in one file).
(dict "root" $ "role" "head" or "worker")
*/}}
{{- define "raylm.initContainers" -}}
{{- if .root.Values.models.fetch -}}
{{- if eq .root.Values.models.volume.type "pvc" }}
{{ include "raylm.waitContainer" .root }}
{{- else }}
{{ include "raylm.fetchContainers" (dict "root" .root "weights" (eq .role "worker")) }}
{{- end -}}
{{- end -}}
{{- if and (eq .workload "service") (include "raylm.hasFront" .root) }}
{{ include "raylm.frontContainer" .root }}
{{- end -}}
{{- end }}

{{/* What a folder holds once it is complete, in its file .fetched. (dict "model" one of models.fetch "weights" bool) */}}
{{- define "raylm.fetched" -}}
{{- $from := "" -}}
{{- with .model.hub }}{{- $from = printf "%s@%s" .repository .revision -}}{{- end -}}
{{- with .model.objectStore }}{{- $from = trim (printf "%s %s" .url (default "" .endpoint)) -}}{{- end -}}
{{- $from -}}{{- if not .weights }} without weights{{ end -}}
{{- end }}

{{- define "raylm.waitContainer" -}}
- name: wait-for-models
  image: {{ include "raylm.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command:
    - bash
    - -c
    - |
      while [ $# -gt 0 ]; do
        until [ "$(cat "$1/.fetched" 2>/dev/null)" = "$2" ]; do
          echo "waiting for the Job that fetches $2 into $1"
          sleep 5
        done
        shift 2
      done
    - wait
    {{- range .Values.models.fetch }}
    - /models/{{ .folder }}
    - {{ include "raylm.fetched" (dict "model" . "weights" true) | quote }}
    {{- end }}
  resources:
    requests: {cpu: 10m, memory: 32Mi}
    limits: {cpu: 100m, memory: 64Mi}
  securityContext: {{- include "raylm.containerSecurity" . | nindent 4 }}
  volumeMounts:
    {{- include "raylm.scratchMounts" . | nindent 4 }}
    - {name: models, mountPath: /models, readOnly: true}
{{- end }}

{{/*
One init container a model. A folder that is complete is left alone, and one that holds something else as well: replicas
may run from it. (dict "root" $ "weights" bool)
*/}}
{{- define "raylm.fetchContainers" -}}
{{- $root := .root -}}
{{- $weights := .weights -}}
{{- $kinds := list "*.safetensors" "*.bin" "*.pt" "*.pth" "*.h5" "*.msgpack" "*.onnx" -}}
{{- range $index, $model := .root.Values.models.fetch }}
- name: fetch-{{ $index }}
  image: {{ if $model.hub }}{{ include "raylm.image" $root }}{{ else }}{{ $root.Values.models.objectStore.image }}{{ end }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command:
    - sh
    - -ec
    - |
      folder=$1 from=$2
      shift 2
      have=$(cat "$folder/.fetched" 2>/dev/null || true)
      if [ "$have" = "$from" ]; then exit 0; fi
      if [ -n "$have" ]; then echo "$folder holds $have; give $from a folder of its own in models.fetch" >&2; exit 1; fi
      "$@"
      printf %s "$from" > "$folder/.fetched.new"
      mv "$folder/.fetched.new" "$folder/.fetched"
    - fetch
    - /models/{{ $model.folder }}
    - {{ include "raylm.fetched" (dict "model" $model "weights" $weights) | quote }}
    {{- if $model.hub }}
    - hf
    - download
    - {{ $model.hub.repository | quote }}
    - --revision
    - {{ $model.hub.revision | quote }}
    - --local-dir
    - /models/{{ $model.folder }}
    {{- else }}
    - aws
    {{- with $model.objectStore.endpoint }}
    - --endpoint-url
    - {{ . | quote }}
    {{- end }}
    - s3
    - sync
    - --no-progress
    - {{ $model.objectStore.url | quote }}
    - /models/{{ $model.folder }}
    {{- end }}
    {{- if not $weights }}
    {{- range $kinds }}
    - --exclude
    - {{ . | quote }}
    {{- end }}
    {{- end }}
  env:
    - {name: HOME, value: /home/raylm}
    {{- if and $model.hub $root.Values.models.hub.secretName }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ $root.Values.models.hub.secretName }}, key: {{ $root.Values.models.hub.secretKey }}}
    {{- end }}
  {{- if and $model.objectStore $root.Values.models.objectStore.secretName }}
  envFrom:
    - secretRef: {name: {{ $root.Values.models.objectStore.secretName }}}
  {{- end }}
  resources: {{- toYaml $root.Values.models.fetchResources | nindent 4 }}
  securityContext: {{- include "raylm.containerSecurity" $root | nindent 4 }}
  volumeMounts:
    {{- include "raylm.scratchMounts" $root | nindent 4 }}
    - {name: models, mountPath: /models}
{{- end }}
{{- end }}

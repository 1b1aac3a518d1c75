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
  emptyDir: {sizeLimit: {{ $volume.size }}}
  {{- else if eq $volume.type "hostPath" }}
  hostPath: {path: {{ $volume.hostPath }}, type: DirectoryOrCreate}
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
{{- with $values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "raylm.scratchMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/raylm}
{{- end }}

{{- define "raylm.apiKeysFile" -}}/etc/raylm/api-keys{{- end }}

{{/* (dict "root" $ "workload" "service" or "batch") */}}
{{- define "raylm.mounts" -}}
- {name: shared-mem, mountPath: /dev/shm}
{{ include "raylm.scratchMounts" .root }}
- {name: models, mountPath: /models, readOnly: true}
{{- if and .root.Values.apiKeys.secretName (eq .workload "service") }}
# The folder: a file that is mounted alone never changes.
- {name: api-keys, mountPath: {{ dir (include "raylm.apiKeysFile" .root) }}, readOnly: true}
{{- end }}
{{- with .root.Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* One init container a model. What is there already is only compared. */}}
{{- define "raylm.fetchContainers" -}}
{{- range $index, $model := .Values.models.fetch }}
- name: fetch-{{ $index }}
  {{- if $model.hub }}
  image: {{ include "raylm.image" $ }}
  imagePullPolicy: {{ $.Values.image.pullPolicy }}
  command:
    - hf
    - download
    - {{ $model.hub.repository | quote }}
    - --revision
    - {{ default "main" $model.hub.revision | quote }}
    - --local-dir
    - /models/{{ $model.folder }}
  env:
    - {name: HOME, value: /home/raylm}
    {{- with $.Values.models.hub.secretName }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ . }}, key: {{ $.Values.models.hub.secretKey }}}
    {{- end }}
  {{- else }}
  image: {{ $.Values.models.objectStore.image }}
  imagePullPolicy: {{ $.Values.image.pullPolicy }}
  command:
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
  env:
    - {name: HOME, value: /home/raylm}
  {{- with $.Values.models.objectStore.secretName }}
  envFrom:
    - secretRef: {name: {{ . }}}
  {{- end }}
  {{- end }}
  resources: {{- toYaml $.Values.models.fetchResources | nindent 4 }}
  securityContext: {{- include "raylm.containerSecurity" $ | nindent 4 }}
  volumeMounts:
    {{- include "raylm.scratchMounts" $ | nindent 4 }}
    - {name: models, mountPath: /models}
{{- end }}
{{- end }}

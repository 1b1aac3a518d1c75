{{/* Says "yes" where HAProxy has other limits than those of the image, or a certificate. */}}
{{- define "raylm.hasFront" -}}
{{- if or .Values.tls.secretName .Values.service.front -}}yes{{- end -}}
{{- end }}

{{- define "raylm.scheme" -}}{{ ternary "https" "http" (ne .Values.tls.secretName "") }}{{- end }}

{{/* Serve starts it as HAProxy. /tmp is a volume of the pod. */}}
{{- define "raylm.frontProgram" -}}/tmp/raylm-front{{- end }}

{{/* Writes it before Ray starts. What is wrong with the certificate is this container's message. */}}
{{- define "raylm.frontContainer" -}}
{{- $front := deepCopy .Values.service.front -}}
{{- if .Values.tls.secretName -}}
{{- $folder := include "raylm.tlsFolder" . -}}
{{- $_ := set $front "tls" (dict "certificate" (printf "%s/tls.crt" $folder) "key" (printf "%s/tls.key" $folder)) -}}
{{- end -}}
- name: front
  image: {{ include "raylm.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command:
    - bash
    - -c
    - printf '%s' "$1" > "$2.yaml" && exec raylm front "$2" --front "$2.yaml"
    - front
    - {{ toJson $front | quote }}
    - {{ include "raylm.frontProgram" . }}
  terminationMessagePolicy: FallbackToLogsOnError
  resources:
    requests: {cpu: 100m, memory: 128Mi}
    limits: {cpu: "1", memory: 512Mi}
  securityContext: {{- include "raylm.containerSecurity" . | nindent 4 }}
  volumeMounts:
    {{- include "raylm.scratchMounts" . | nindent 4 }}
    {{- if .Values.tls.secretName }}
    - {name: tls, mountPath: {{ include "raylm.tlsFolder" . }}, readOnly: true}
    {{- end }}
{{- end }}

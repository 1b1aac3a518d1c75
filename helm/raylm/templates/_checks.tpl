{{/* What the schema cannot say. Each refusal names the value. */}}
{{- define "raylm.checkGroups" -}}
{{- $key := .key -}}
{{- $names := list -}}
{{- range $index, $group := .groups -}}
{{- $place := printf "%s[%d]" $key $index -}}
{{- if has $group.name $names -}}
{{- fail (printf "%s.name is %q, which another group has too" $place $group.name) -}}
{{- end -}}
{{- $names = append $names $group.name -}}
{{- $low := int $group.minReplicas -}}
{{- $high := int $group.maxReplicas -}}
{{- if gt $low $high -}}
{{- fail (printf "%s.minReplicas is %d; at most its maxReplicas, %d" $place $low $high) -}}
{{- end -}}
{{- $count := int (dig "replicas" $low $group) -}}
{{- if or (lt $count $low) (gt $count $high) -}}
{{- fail (printf "%s.replicas is %d; from its minReplicas, %d, to its maxReplicas, %d" $place $count $low $high) -}}
{{- end -}}
{{- $kept := int (dig "minAvailable" 0 $group) -}}
{{- $pods := mul $low (default 1 $group.hosts) | int -}}
{{- if and (gt $kept 0) (hasPrefix "batch." $key) -}}
{{- fail (printf "%s.minAvailable is %d; leave it out, because a batch has no PodDisruptionBudget" $place $kept) -}}
{{- end -}}
{{- if and (gt $kept 0) (ge $kept $pods) -}}
{{- fail (printf "%s.minAvailable is %d; at most %d, one less than minReplicas × hosts, or a node with its pods could not be drained" $place $kept (sub $pods 1)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Where the args of the application come from. */}}
{{- define "raylm.argsPlace" -}}
{{ ternary "service.args" (printf "deployments/%s.yaml: args" .Values.service.deployment) (not (empty .Values.service.args)) }}
{{- end }}

{{/* One file of keys, from one place. */}}
{{- define "raylm.checkKeys" -}}
{{- if .Values.apiKeys.secretName -}}
{{- range $application := (include "raylm.deployment" . | fromYaml).applications -}}
{{- with dig "ingress" "http" "api_keys_file" "" $application.args -}}
{{- fail (printf "%s.ingress.http.api_keys_file is %q; leave it out, because apiKeys.secretName is %q" (include "raylm.argsPlace" $) . $.Values.apiKeys.secretName) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* `auto` is decided when the application is built, and the GPU pods may not be up by then. */}}
{{- define "raylm.checkDevices" -}}
{{- $gpus := 0 -}}
{{- range .Values.workerGroups -}}{{- $gpus = add $gpus (default 0 .gpus) -}}{{- end -}}
{{- $place := include "raylm.argsPlace" . -}}
{{- range $application := (include "raylm.deployment" . | fromYaml).applications -}}
{{- range $index, $model := $application.args.models -}}
{{- if and (gt $gpus 0) (kindIs "map" $model.engine) -}}
{{- if eq (dig "runtime" "device" "auto" $model.engine) "auto" -}}
{{- fail (printf "%s.models[%d].engine.runtime.device is \"auto\"; with GPU worker groups it must be \"cuda\" or \"cpu\", because it is decided when the GPU pods may not be up yet" $place $index) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

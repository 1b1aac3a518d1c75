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

{{/* One file of keys, from one place. */}}
{{- define "raylm.checkKeys" -}}
{{- if .Values.apiKeys.secretName -}}
{{- with dig "http" "api_keys_file" "" .Values.service.ingress -}}
{{- fail (printf "service.ingress.http.api_keys_file is %q; leave it out, because apiKeys.secretName is %q" . $.Values.apiKeys.secretName) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Replicas are a number or follow the queue. */}}
{{- define "raylm.checkReplicas" -}}
{{- range $index, $model := .Values.service.models -}}
{{- $place := printf "service.models[%d]" $index -}}
{{- if and $model.replicas $model.autoscaling -}}
{{- fail (printf "%s has both replicas and autoscaling; leave out one of them" $place) -}}
{{- end -}}
{{- with $model.autoscaling -}}
{{- $low := int (default 1 .min_replicas) -}}
{{- $high := int (default 1 .max_replicas) -}}
{{- if gt $low $high -}}
{{- fail (printf "%s.autoscaling.max_replicas is %d; at least its min_replicas, %d" $place $high $low) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* `auto` is decided when the application is built, and the GPU pods may not be up by then. */}}
{{- define "raylm.checkDevices" -}}
{{- $gpus := 0 -}}
{{- range .Values.workerGroups -}}{{- $gpus = add $gpus (default 0 .gpus) -}}{{- end -}}
{{- range $index, $application := (include "raylm.deployment" . | fromYaml).applications -}}
{{- if and (gt $gpus 0) (include "raylm.isModel" $application) (kindIs "map" $application.args.engine) -}}
{{- if eq (dig "runtime" "device" "auto" $application.args.engine) "auto" -}}
{{- $place := ternary (printf "service.models[%d]" (sub $index 1)) (printf "deployments/%s.yaml: applications[%d].args" $.Values.service.deployment $index) (not (empty $.Values.service.models)) -}}
{{- fail (printf "%s.engine.runtime.device is \"auto\"; with GPU worker groups it must be \"cuda\" or \"cpu\", because it is decided when the GPU pods may not be up yet" $place) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

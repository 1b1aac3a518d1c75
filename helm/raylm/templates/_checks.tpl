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
{{- include "raylm.checkShared" (dict "place" $place "group" $group) -}}
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

{{/* What lies in /dev/shm is memory of the pod. */}}
{{- define "raylm.checkShared" -}}
{{- with dig "limits" "memory" "" .group.resources -}}
{{- if ge (include "raylm.bytes" $.group.sharedMemory | int64) (include "raylm.bytes" . | int64) -}}
{{- fail (printf "%s.sharedMemory is %v; less than its resources.limits.memory, %v, of which it is a part" $.place $.group.sharedMemory .) -}}
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
{{- with .Values.apiKeys.tenantsSecretName -}}
{{- if not $.Values.apiKeys.secretName -}}
{{- fail (printf "apiKeys.tenantsSecretName is %q, and apiKeys.secretName is empty; it is a key that says which tenant asks" .) -}}
{{- end -}}
{{- $secret := . -}}
{{- with dig "http" "tenants_file" "" $.Values.service.ingress -}}
{{- fail (printf "service.ingress.http.tenants_file is %q; leave it out, because apiKeys.tenantsSecretName is %q" . $secret) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* What HAProxy does wants HAProxy, and an address that its certificate is for. */}}
{{- define "raylm.checkFront" -}}
{{- if not .Values.service.haProxy -}}
{{- if .Values.tls.secretName -}}
{{- fail (printf "tls.secretName is %q; only HAProxy does this, and service.haProxy is false" .Values.tls.secretName) -}}
{{- end -}}
{{- if .Values.service.front -}}
{{- fail "service.front is for HAProxy, and service.haProxy is false" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.tls.secretName (include "raylm.incremental" .) -}}
{{- fail (printf "tls.secretName is %q; leave it out, because the Gateway that service.upgrade NewClusterWithIncrementalUpgrade has KubeRay make speaks HTTP to the pods" .Values.tls.secretName) -}}
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
{{- $low := int (dig "min_replicas" 1 .) -}}
{{- $high := int (dig "max_replicas" 1 .) -}}
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

{{/* Volumes that pods could not use as the values have it. */}}
{{- define "raylm.checkModels" -}}
{{- $volume := .Values.models.volume -}}
{{- if and .Values.models.fetch (has $volume.type (list "hostPath" "image")) -}}
{{- fail (printf "models.volume.type is %q; models.fetch wants emptyDir or pvc, because pods cannot write to it" $volume.type) -}}
{{- end -}}
{{- if and .Values.models.fetch (eq $volume.type "emptyDir") (not $volume.size) -}}
{{- fail "models.volume.size is empty; with emptyDir and models.fetch it must have room for all models of models.fetch" -}}
{{- end -}}
{{- if and (eq $volume.type "pvc") (not $volume.claimName) -}}
{{- if not $volume.size -}}
{{- fail "models.volume.size is empty; the claim that the chart makes wants one" -}}
{{- end -}}
{{- if not (has "ReadWriteMany" $volume.accessModes) -}}
{{- fail (printf "models.volume.accessModes is [%s]; ReadWriteMany must be one of them, because head and workers are pods of several nodes (a claim of your own: models.volume.claimName)" (join ", " $volume.accessModes)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* An upgrade through a Gateway: what KubeRay wants of it, and who makes the ways in. */}}
{{- define "raylm.checkUpgrade" -}}
{{- if include "raylm.incremental" . -}}
{{- $options := .Values.service.upgradeOptions -}}
{{- if not .Values.autoscaler.enabled -}}
{{- fail "autoscaler.enabled is false; service.upgrade NewClusterWithIncrementalUpgrade needs Ray's autoscaler" -}}
{{- end -}}
{{- if not $options.gatewayClassName -}}
{{- fail "service.upgradeOptions.gatewayClassName is empty; service.upgrade NewClusterWithIncrementalUpgrade needs one" -}}
{{- end -}}
{{- if gt (int $options.stepSizePercent) (int $options.maxSurgePercent) -}}
{{- fail (printf "service.upgradeOptions.stepSizePercent is %d; at most maxSurgePercent, %d" (int $options.stepSizePercent) (int $options.maxSurgePercent)) -}}
{{- end -}}
{{- range $name := list "ingress" "httpRoute" -}}
{{- if (get $.Values $name).enabled -}}
{{- fail (printf "%s.enabled is true; with service.upgrade NewClusterWithIncrementalUpgrade clients come through the Gateway %s-gateway that KubeRay makes, so leave it out" $name (include "raylm.fullname" $)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* An engine that no pod of any group, or not all pods together, could hold would wait for placementSeconds and give up. */}}
{{- define "raylm.checkParallel" -}}
{{- $wanted := 0 -}}
{{- $gpus := 0 -}}
{{- range .Values.workerGroups -}}
{{- $gpus = add $gpus (mul (default 0 .gpus | int) (default 1 .hosts | int) (int .maxReplicas)) -}}
{{- end -}}
{{- range $index, $application := (include "raylm.deployment" . | fromYaml).applications -}}
{{- if and (include "raylm.isModel" $application) (kindIs "map" $application.args.engine) -}}
{{- $engine := $application.args.engine -}}
{{- $parallel := default dict $engine.parallel -}}
{{- $tensor := int (default 1 $parallel.tensor) -}}
{{- $stages := int (default 1 $parallel.pipeline) -}}
{{- if eq (dig "runtime" "device" "auto" $engine) "cuda" -}}
{{- $place := ternary (printf "service.models[%d]" (sub $index 1)) (printf "deployments/%s.yaml: applications[%d].args" $.Values.service.deployment $index) (not (empty $.Values.service.models)) -}}
{{- $room := 0 -}}
{{- $most := 0 -}}
{{- range $group := $.Values.workerGroups -}}
{{- $type := dig "ray.io/accelerator-type" "" (default dict $group.rayLabels) -}}
{{- if or (not $parallel.gpu_type) (eq $type (default "" $parallel.gpu_type)) -}}
{{- $gpus := int (default 0 $group.gpus) -}}
{{- $most = max $most $gpus -}}
{{- $room = add $room (mul (div $gpus $tensor) (default 1 $group.hosts | int) (int $group.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- $where := "workerGroups" -}}
{{- with $parallel.gpu_type -}}{{- $where = printf "workerGroups with rayLabels ray.io/accelerator-type: %s" . -}}{{- end -}}
{{- if gt $tensor (int $most) -}}
{{- fail (printf "%s.engine.parallel.tensor is %d; a pod of %s has %d GPUs at most, and a tensor group is in one pod" $place $tensor $where (int $most)) -}}
{{- end -}}
{{- $wanted = add $wanted (mul $tensor $stages (include "raylm.leastReplicas" $application | int)) -}}
{{- if gt $stages (int $room) -}}
{{- fail (printf "%s.engine.parallel.pipeline is %d; %s have room for %d stages of %d GPUs (maxReplicas × hosts × gpus)" $place $stages $where (int $room) $tensor) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if gt (int $wanted) (int $gpus) -}}
{{- fail (printf "the models want %d GPUs at the least (replicas × tensor × pipeline); workerGroups have %d at most (maxReplicas × hosts × gpus)" (int $wanted) (int $gpus)) -}}
{{- end -}}
{{- end }}

{{/* The replicas that an application has at all times. */}}
{{- define "raylm.leastReplicas" -}}
{{- $options := dict -}}
{{- range .deployments -}}{{- $options = . -}}{{- end -}}
{{- dig "autoscaling_config" "min_replicas" (dig "num_replicas" 1 $options) $options -}}
{{- end }}

{{/* A Kubernetes quantity of memory as a number of bytes. */}}
{{- define "raylm.bytes" -}}
{{- $text := toString . -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- $powers := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- mulf (trimSuffix $unit $text | float64) (get $powers $unit) | int64 -}}
{{- end }}

{{/*
The Serve configuration: the deployment's own file, or one application for the HTTP face and one for each of service.models;
with what a cluster of pods needs, and where its API keys are. Everything listens on the pod's address; engines too, because
`auto` would look at the cluster while only its head is up.
*/}}
{{- define "raylm.serveConfig" -}}
{{- $port := int .Values.service.port -}}
{{- $config := include "raylm.deployment" . | fromYaml -}}
{{- range $application := $config.applications -}}
{{- $args := merge (dict) (default dict $application.args) -}}
{{- if include "raylm.isModel" $application -}}
{{- if not (hasKey $args "channel_host") -}}{{- $_ := set $args "channel_host" "node" -}}{{- end -}}
{{- else if $.Values.apiKeys.secretName -}}
{{- $http := set (deepCopy (default dict $args.http)) "api_keys_file" (include "raylm.apiKeysFile" $) -}}
{{- if $.Values.apiKeys.tenantsSecretName -}}
{{- $http = set $http "tenants_file" (include "raylm.tenantsFile" $) -}}
{{- end -}}
{{- $_ := set $args "http" $http -}}
{{- end -}}
{{- $_ := set $application "args" $args -}}
{{- end -}}
{{- $_ := set $config "proxy_location" "EveryNode" -}}
{{- $_ := set $config "http_options" (merge (dict "host" "0.0.0.0" "port" $port) (default dict $config.http_options)) -}}
{{- toYaml $config -}}
{{- end }}

{{/*
deployments/<service.deployment>.yaml, or in its place what service.models says; service.ingress is for either. Each engine
is its content where it is one of configs/ and not a file that only the image has. Engines wait for pods: images are pulled,
models fetched.
*/}}
{{- define "raylm.deployment" -}}
{{- $name := .Values.service.deployment -}}
{{- $text := .Files.Get (printf "deployments/%s.yaml" $name) -}}
{{- if not $text -}}
{{- $known := list -}}
{{- range $path, $_ := .Files.Glob "deployments/*.yaml" -}}{{- $known = append $known (base $path | trimSuffix ".yaml") -}}{{- end -}}
{{- fail (printf "service.deployment is %q; the chart has %s" $name (join ", " $known)) -}}
{{- end -}}
{{- $config := fromYaml $text -}}
{{- if .Values.service.models -}}
{{- $_ := set $config "applications" (include "raylm.applications" . | fromYaml).applications -}}
{{- end -}}
{{- range $application := $config.applications -}}
{{- $args := deepCopy (default dict $application.args) -}}
{{- if include "raylm.isModel" $application -}}
{{- $_ := set $args "engine" (include "raylm.engine" (dict "root" $ "engine" $args.engine) | fromYaml).engine -}}
{{- else -}}
{{- $ingress := $.Values.service.ingress -}}
{{- $args = mergeOverwrite $args (omit (deepCopy $ingress) "replicas") -}}
{{- if eq $.Values.service.logFormat "json" -}}
{{- $_ := set $args "log" (merge (dict) (default dict $args.log) (dict "format" "json")) -}}
{{- end -}}
{{- if hasKey $ingress "replicas" -}}
{{- $_ := set $application "deployments" (list (dict "name" "OpenAIIngress" "num_replicas" $ingress.replicas)) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $application "args" $args -}}
{{- end -}}
{{- toYaml $config -}}
{{- end }}

{{/* Says "yes" of an application of raylm.serving.app:build_model, and nothing of another. */}}
{{- define "raylm.isModel" -}}
{{- if hasSuffix ":build_model" .import_path -}}yes{{- end -}}
{{- end }}

{{/* The applications of service.models and the HTTP face. A model's is called by the model's name, so that it is the same
one wherever it is in the list. */}}
{{- define "raylm.applications" -}}
applications:
  - name: llm
    route_prefix: /
    import_path: raylm.serving.app:build_ingress
{{- $names := list }}
{{- range $index, $model := .Values.service.models }}
{{- $name := include "raylm.modelName" $model.engine }}
{{- if has $name $names }}
{{- fail (printf "service.models[%d] is named %q, as another one; give one of them another model.name" $index $name) }}
{{- end }}
{{- $names = append $names $name }}
  - name: {{ printf "model-%s" $name | quote }}
    route_prefix: null
    import_path: raylm.serving.app:build_model
    args: {{- omit $model "replicas" "autoscaling" | toYaml | nindent 6 }}
    deployments:
      - name: ModelReplica
        {{- with $model.autoscaling }}
        autoscaling_config:
          min_replicas: {{ dig "min_replicas" 1 . }}
          {{- if eq (dig "min_replicas" 1 . | int) 0 }}
          initial_replicas: 1
          {{- end }}
          max_replicas: {{ dig "max_replicas" 1 . }}
          upscale_delay_s: {{ dig "upscale_delay_s" 5 . }}
          downscale_delay_s: {{ dig "downscale_delay_s" 120 . }}
          look_back_period_s: 15
          policy:
            policy_function: raylm.serving.autoscaling:QueuePolicy
            policy_kwargs:
              target_queued_requests: {{ dig "target_queued_requests" 4 . }}
              {{- range $name := list "target_queued_tokens" "target_queue_s" "max_kv_usage" }}
              {{- with get $model.autoscaling $name }}
              {{ $name }}: {{ . }}
              {{- end }}
              {{- end }}
        {{- else }}
        num_replicas: {{ default 1 $model.replicas }}
        {{- end }}
{{- end }}
{{- end }}

{{/* model.name of an engine, or the last part of its path, as raylm has it; of a file only the file's own name is known. */}}
{{- define "raylm.modelName" -}}
{{- if kindIs "string" . -}}
{{- base . | trimSuffix ".yaml" -}}
{{- else -}}
{{- default (base .model.path | trimSuffix ".gguf") .model.name -}}
{{- end -}}
{{- end }}

{{/* (dict "root" $ "engine" its content or a file's name) */}}
{{- define "raylm.engine" -}}
{{- $engine := .engine -}}
{{- if kindIs "string" $engine -}}
{{- with .root.Files.Get $engine -}}{{- $engine = fromYaml . -}}{{- end -}}
{{- end -}}
{{- if kindIs "map" $engine -}}
{{- $wait := dict "placement_timeout_s" .root.Values.service.placementSeconds -}}
{{- $engine = set (deepCopy $engine) "parallel" (merge (dict) (default dict $engine.parallel) $wait) -}}
{{- if eq .root.Values.service.logFormat "json" -}}
{{- $engine = set $engine "runtime" (merge (dict) (default dict $engine.runtime) (dict "log_format" "json")) -}}
{{- end -}}
{{- end -}}
{{- toYaml (dict "engine" $engine) -}}
{{- end }}

{{/*
Seconds of the longest drain_timeout_s of models and ingresses (60 where none is given), and what Serve adds to it: the
engine's end, and behind HAProxy the time that it has to let go of a replica.
*/}}
{{- define "raylm.modelDrainSeconds" -}}
{{- $longest := 0 -}}
{{- range $application := (include "raylm.deployment" . | fromYaml).applications -}}
{{- $args := default dict $application.args -}}
{{- $longest = max $longest (ceil (ternary $args.drain_timeout_s 60 (hasKey $args "drain_timeout_s")) | int) -}}
{{- end -}}
{{ add $longest 30 (ternary (include "raylm.releaseSeconds" . | int) 0 .Values.service.haProxy) }}
{{- end }}

{{/* HAProxy hears of a replica that goes within a tenth of a second; Serve's default is for load balancers. */}}
{{- define "raylm.releaseSeconds" -}}5{{- end }}

{{/* From the moment that a pod is asked to go: replacements, then the models' drain. */}}
{{- define "raylm.drainSeconds" -}}
{{ add .Values.drain.replacementSeconds (include "raylm.modelDrainSeconds" . | trim | int) }}
{{- end }}

{{/* Serve ends 32 s after SIGTERM, and is given 8 more. */}}
{{- define "raylm.graceSeconds" -}}
{{ add (include "raylm.drainSeconds" . | trim | int) 40 }}
{{- end }}

{{/*
Of one pod, from the moment that it is asked to go: `drain`, until when requests end, and `grace`, until when it is killed.
Where its group has terminationSeconds, machines that are taken away, a fifth of it, at most what Serve needs, is Serve's.
*/}}
{{- define "raylm.podTimes" -}}
{{- $drain := include "raylm.drainSeconds" .root | trim | int -}}
{{- $grace := include "raylm.graceSeconds" .root | trim | int -}}
{{- with .group.terminationSeconds -}}
{{- $grace = int . -}}
{{- $drain = sub $grace (min 40 (div $grace 5)) -}}
{{- end -}}
{{ toYaml (dict "drain" $drain "grace" $grace) }}
{{- end }}

{{/*
The Serve configuration: the deployment's own file, with what a cluster of pods needs, and where its API keys are.
Everything listens on the pod's address; engines too, because `auto` would look at the cluster while only its head is up.
*/}}
{{- define "raylm.serveConfig" -}}
{{- $port := int .Values.service.port -}}
{{- $config := include "raylm.deployment" . | fromYaml -}}
{{- $applications := list -}}
{{- range $config.applications -}}
{{- $args := merge (dict) (default dict .args) -}}
{{- if not (hasKey $args "channel_host") -}}{{- $_ := set $args "channel_host" "node" -}}{{- end -}}
{{- if $.Values.apiKeys.secretName -}}
{{- $ingress := deepCopy (default dict $args.ingress) -}}
{{- $http := set (default dict $ingress.http) "api_keys_file" (include "raylm.apiKeysFile" $) -}}
{{- $_ := set $args "ingress" (set $ingress "http" $http) -}}
{{- end -}}
{{- $applications = append $applications (set . "args" $args) -}}
{{- end -}}
{{- $_ := set $config "applications" $applications -}}
{{- $_ := set $config "proxy_location" "EveryNode" -}}
{{- $_ := set $config "http_options" (merge (dict "host" "0.0.0.0" "port" $port) (default dict $config.http_options)) -}}
{{- toYaml $config -}}
{{- end }}

{{/*
deployments/<service.deployment>.yaml, with service.args in place of its args, and each engine as its content where it is
one of configs/ and not a file that only the image has. Engines wait for pods: images are pulled, models fetched.
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
{{- if .Values.service.args -}}
{{- $application := set (first $config.applications) "args" .Values.service.args -}}
{{- $_ := set $config "applications" (list $application) -}}
{{- end -}}
{{- range $application := $config.applications -}}
{{- $args := default dict $application.args -}}
{{- $models := list -}}
{{- range $model := $args.models -}}
{{- $models = append $models (set (deepCopy $model) "engine" (include "raylm.engine" (dict "root" $ "engine" $model.engine) | fromYaml).engine) -}}
{{- end -}}
{{- $_ := set $application "args" (set (deepCopy $args) "models" $models) -}}
{{- end -}}
{{- toYaml $config -}}
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
{{- end -}}
{{- toYaml (dict "engine" $engine) -}}
{{- end }}

{{/* Seconds of the longest drain_timeout_s of the models (60 where none is given), and what Serve adds to it. */}}
{{- define "raylm.modelDrainSeconds" -}}
{{- $longest := 0 -}}
{{- range $app := (include "raylm.deployment" . | fromYaml).applications -}}
{{- range (default dict $app.args).models -}}
{{- $longest = max $longest (ceil (ternary .drain_timeout_s 60 (hasKey . "drain_timeout_s")) | int) -}}
{{- end -}}
{{- end -}}
{{ add $longest 30 }}
{{- end }}

{{/* From the moment that a pod is asked to go: replacements, then the models' drain. */}}
{{- define "raylm.drainSeconds" -}}
{{ add .Values.drain.replacementSeconds (include "raylm.modelDrainSeconds" . | trim | int) }}
{{- end }}

{{/* Serve ends 32 s after SIGTERM, and is given 8 more. */}}
{{- define "raylm.graceSeconds" -}}
{{ add (include "raylm.drainSeconds" . | trim | int) 40 }}
{{- end }}

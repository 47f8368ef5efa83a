{{/* The name of everything: 24 characters, so that those of pods fit into 63, and a letter first. */}}
{{- define "slackline.name" -}}
{{- if regexMatch "^[a-z].*slackline|^slackline" .Release.Name -}}
{{- .Release.Name | trunc 24 | trimSuffix "-" -}}
{{- else -}}
{{- printf "slackline-%s" .Release.Name | trunc 24 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Takes (list root component), or (list root "worker" model). */}}
{{- define "slackline.selector" -}}
app.kubernetes.io/name: slackline
app.kubernetes.io/instance: {{ (index . 0).Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- if gt (len .) 2 }}
slackline/model: {{ index . 2 | quote }}
{{- end }}
{{- end -}}

{{- define "slackline.labels" -}}
{{ include "slackline.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version | quote }}
{{- end -}}

{{- define "slackline.metadata" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
namespace: {{ $root.Release.Namespace | quote }}
labels:
  {{- include "slackline.labels" (concat (list $root) (slice . 2)) | nindent 2 }}
{{- end -}}

{{/* Takes (list root name of the image in values). */}}
{{- define "slackline.image" -}}
{{- $root := index . 0 -}}
{{- $name := get $root.Values.image (index . 1) -}}
{{- $tag := $root.Values.image.tag | default $root.Chart.AppVersion -}}
image: {{ printf "%s%s:%s" (ternary "" (printf "%s/" $root.Values.image.registry) (empty $root.Values.image.registry)) $name $tag | quote }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
{{- end -}}

{{/* As compose has it: another user than root, a root that is read-only, no capabilities. */}}
{{- define "slackline.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "slackline.containerSecurity" -}}
securityContext:
  runAsNonRoot: true
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
{{- end -}}

{{- define "slackline.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "slackline.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "slackline.natsPod" -}}
{{ include "slackline.name" (index . 0) }}-nats-{{ index . 1 }}.{{ include "slackline.name" (index . 0) }}-nats.{{ (index . 0).Release.Namespace }}.svc
{{- end -}}

{{- define "slackline.url" -}}
{{- if .Values.nats.external -}}
{{- .Values.nats.external -}}
{{- else -}}
{{- range $n := until (int .Values.nats.replicas) -}}
{{- if $n }},{{ end }}nats://{{ include "slackline.natsPod" (list $ $n) }}:4222
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The replicas that the models may have, with commas: each has a key and a log. */}}
{{- define "slackline.replicas" -}}
{{- $names := list -}}
{{- range $model := .Values.models -}}
{{- range $n := until (int $model.replicas.to) -}}
{{- $names = append $names (printf "%s-worker-%s-%d" (include "slackline.name" $) $model.name $n) -}}
{{- end -}}
{{- end -}}
{{- join "," $names -}}
{{- end -}}

{{/* Takes (list model path): a path in the model's volume, or the name of a shipped model. */}}
{{- define "slackline.path" -}}
{{- $model := index . 0 -}}
{{- if $model.volume -}}
{{- printf "/models/%s/%s" $model.name (index . 1) | trimSuffix "/" -}}
{{- else -}}
{{- index . 1 -}}
{{- end -}}
{{- end -}}

{{/* The name under which clients ask for the model. */}}
{{- define "slackline.announced" -}}
{{- .folder | default .name | base -}}
{{- end -}}

{{/* The environment of every process. Takes (list root section). */}}
{{- define "slackline.environment" -}}
{{- $root := index . 0 -}}
{{- $section := index . 1 -}}
- { name: SLACKLINE_URL, value: {{ include "slackline.url" $root | quote }} }
- { name: SLACKLINE_CREDS, value: /keys/user.nk }
- { name: SLACKLINE_TLS_CA, value: /keys/ca.pem }
{{- if $section }}
- { name: SLACKLINE_CONFIG, value: /config/slackline.toml }
- { name: SLACKLINE_POLICY, value: {{ $root.Values.policy.name | quote }} }
{{- with $root.Values.policy.settings }}
- { name: SLACKLINE_SETTINGS, value: {{ toJson . | quote }} }
{{- end }}
- { name: SLACKLINE_LOG_LEVEL, value: {{ $root.Values.logLevel }} }
- { name: SLACKLINE_METRICS_HOST, value: 0.0.0.0 }
- { name: SLACKLINE_METRICS_PORT, value: "9464" }
- { name: SLACKLINE_{{ upper $section }}_DRAIN_S, value: {{ get $root.Values.drain $section | quote }} }
{{- with $root.Values.otlp }}
- { name: OTEL_TRACES_EXPORTER, value: otlp }
- { name: OTEL_METRICS_EXPORTER, value: otlp }
- { name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }} }
{{- else }}
- { name: OTEL_TRACES_EXPORTER, value: none }
- { name: OTEL_METRICS_EXPORTER, value: none }
{{- end }}
{{- end }}
{{- end -}}

{{/* A user's own Secret. Its keys are named, so that a pod waits for the Job that makes them. */}}
{{- define "slackline.keysVolume" -}}
- name: keys
  secret:
    secretName: {{ include "slackline.name" (index . 0) }}-keys-{{ index . 1 }}
    defaultMode: 0440
    items: [{ key: user.nk, path: user.nk }, { key: ca.pem, path: ca.pem }]
{{- end -}}

{{- define "slackline.configVolume" -}}
- name: config
  configMap: { name: {{ include "slackline.name" . }}-config }
{{- end -}}

{{/* The tokenizers that admission reads, once each; nothing for sim without one. */}}
{{- define "slackline.tokenizers" -}}
{{- $found := list -}}
{{- range $model := .Values.models -}}
{{- $path := ternary $model.tokenizer $model.folder (eq $model.engine "sim") | default "" -}}
{{- if or $path (and $model.volume (ne $model.engine "sim")) -}}
{{- $found = append $found (include "slackline.path" (list $model $path)) -}}
{{- end -}}
{{- end -}}
{{- $found | uniq | join "," -}}
{{- end -}}

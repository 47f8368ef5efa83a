{{/* Takes (list root name component [model]). */}}
{{- define "slackline.budget" }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "slackline.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "slackline.selector" (concat (list (index . 0)) (slice . 2)) | nindent 6 }}
{{- end }}

{{/* Takes (list root component [model]). */}}
{{- define "slackline.spread" }}
topologySpreadConstraints:
  {{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "slackline.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}

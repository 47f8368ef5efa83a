{{/*
A Job that is run again when what it makes changes: a Job's pod cannot be changed, so its name has a
digest of that. Takes (list root name wanted).
*/}}
{{- define "slackline.job" }}
{{- $root := index . 0 }}
{{- $job := index . 1 }}
{{- $wanted := index . 2 }}
{{- $name := include "slackline.name" $root }}
{{- $image := include "slackline.image" (list $root "services") }}
{{- $url := include "slackline.url" $root }}
{{- $digest := list $wanted $image $url ($root.Files.Get "files/keys.py") $root.Values.jobs | toJson | sha256sum | trunc 8 }}
apiVersion: batch/v1
kind: Job
metadata:
  {{- include "slackline.metadata" (list $root (printf "%s-%s-%s" $name $job $digest) $job) | nindent 2 }}
spec:
  backoffLimit: 20 # pauses of 10 s, 20 s and so on up to six minutes: the servers may come late
  template:
    metadata:
      labels: {{- include "slackline.labels" (list $root $job) | nindent 8 }}
    spec:
      serviceAccountName: {{ ternary (printf "%s-keys" $name) $name (eq $job "keys") }}
      {{- include "slackline.podSecurity" $root | nindent 6 }}
      {{- include "slackline.pullSecrets" $root | nindent 6 }}
      {{- include "slackline.placement" $root.Values | nindent 6 }}
      restartPolicy: OnFailure
      containers:
        - name: {{ $job }}
          {{- $image | nindent 10 }}
          {{- if eq $job "keys" }}
          command: [python, /script/keys.py, {{ toJson $wanted | quote }}]
          {{- else }}
          command: [python, -m, loadgen, streams, --copies, "3", --workers, {{ $wanted.replicas | quote }}]
          env: {{- include "slackline.environment" (list $root "") | nindent 12 }}
          {{- end }}
          {{- include "slackline.containerSecurity" $root | nindent 10 }}
          resources: {{- toYaml $root.Values.jobs.resources | nindent 12 }}
          volumeMounts:
            - { name: keys, mountPath: /keys, readOnly: {{ ne $job "keys" }} }
            - { name: tmp, mountPath: /tmp }
            {{- if eq $job "keys" }}
            - { name: script, mountPath: /script, readOnly: true }
            - { name: account, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true }
            {{- end }}
      volumes:
        - { name: tmp, emptyDir: { sizeLimit: 64Mi } }
        {{- if eq $job "keys" }}
        - { name: keys, emptyDir: { medium: Memory, sizeLimit: 16Mi } }
        - { name: script, configMap: { name: {{ $name }}-keys } }
        - name: account # what automountServiceAccountToken would mount, for this container alone
          projected:
            defaultMode: 0440
            sources:
              - serviceAccountToken: { path: token, expirationSeconds: 3607 }
              - configMap: { name: kube-root-ca.crt, items: [{ key: ca.crt, path: ca.crt }] }
              - downwardAPI: { items: [{ path: namespace, fieldRef: { fieldPath: metadata.namespace } }] }
        {{- else }}
        {{- include "slackline.keysVolume" (list $root "operator") | nindent 8 }}
        {{- end }}
{{- end }}

{{- define "pdserve.fullname" -}}
{{- if eq .Release.Name .Chart.Name }}{{ .Chart.Name }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* Labels of everything; of one component with (list $ "router"). */}}
{{- define "pdserve.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Labels by which a Deployment of routers or instances knows its pods. They cannot be changed, so neither can the model: new
routers would give old instances the tokens of another tokenizer. */}}
{{- define "pdserve.podLabels" -}}
{{- $root := index . 0 -}}
{{ include "pdserve.selectorLabels" . }}
pdserve/model: {{ regexReplaceAll "[^A-Za-z0-9._-]" $root.Values.model.name "_" | trunc 63 | trimAll "._-" | quote }}
{{- end }}

{{- define "pdserve.labels" -}}
{{- $root := index . 0 -}}
{{ include "pdserve.selectorLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end }}

{{/* Strategy of a Deployment, from {recreate, maxSurge, maxUnavailable}. */}}
{{- define "pdserve.strategy" -}}
{{- if .recreate }}{type: Recreate}
{{- else }}{type: RollingUpdate, rollingUpdate: {maxSurge: {{ .maxSurge }}, maxUnavailable: {{ .maxUnavailable }}}}
{{- end }}
{{- end }}

{{- define "pdserve.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* URL of the Redis; empty without one. */}}
{{- define "pdserve.redisUrl" -}}
{{- if .Values.redis.url }}{{ .Values.redis.url }}
{{- else if .Values.redis.enabled }}redis://{{ include "pdserve.fullname" . }}-redis:6379/0
{{- end }}
{{- end }}

{{/* URL of the registry; empty where instances dial the one router by its Service: a certificate cannot name pods' addresses. */}}
{{- define "pdserve.registry" -}}
{{- if not .Values.tls.control }}{{ include "pdserve.redisUrl" . }}{{ end }}
{{- end }}

{{- define "pdserve.connector" -}}
{{- .Values.connector | default (ternary "file:///store" (include "pdserve.redisUrl" .) (ne (include "pdserve.hasStore" .) "")) }}
{{- end }}

{{/* Not empty if instances mount /store. */}}
{{- define "pdserve.hasStore" -}}
{{- if or .Values.store.size .Values.store.volume }}yes{{ end }}
{{- end }}

{{/* Settings of a role, with (list $ "prefill"): those of `instances`, and its own over them. */}}
{{- define "pdserve.role" -}}
{{- $root := index . 0 -}}
{{- mergeOverwrite (deepCopy $root.Values.instances) (deepCopy (index $root.Values (index . 1))) | toYaml }}
{{- end }}

{{/* What a probe asks, with (list $ service path HTTP's port gRPC's port scheme): a gRPC service, or a path. */}}
{{- define "pdserve.probe" -}}
{{- if (index . 0).Values.grpcProbes }}grpc: {port: {{ index . 4 }}, service: {{ index . 1 }}}
{{- else }}httpGet: {path: {{ index . 2 }}, port: {{ index . 3 }}, scheme: {{ index . 5 }}}
{{- end }}
{{- end }}

{{/* Arguments of a map of flags. toJson, because YAML's numbers are floats, which Go prints as 4e+06. */}}
{{- define "pdserve.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- {{ printf "--%s%s" (ternary "" "no-" $value) $name | quote }}
{{- else }}
- {{ printf "--%s=%s" $name (ternary $value (toJson $value) (kindIs "string" $value)) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* Arguments of routers and instances. */}}
{{- define "pdserve.modelArguments" -}}
- --model={{ .Values.model.name }}
{{- with .Values.model.servedName }}
- --served-model-name={{ . }}
{{- end }}
{{- if .Values.tls.control }}
- --control-certfile=/etc/pdserve/control/tls.crt
- --control-keyfile=/etc/pdserve/control/tls.key
- --control-cafile=/etc/pdserve/control/ca.crt
{{- end }}
{{- end }}

{{/* An environment variable from an entry of the Secret, with (list $ "REDIS_PASSWORD" "redisPassword"). */}}
{{- define "pdserve.secretVariable" -}}
{{- $root := index . 0 -}}
{{- with index $root.Values.secrets (index . 2) }}
- name: {{ index $ 1 }}
  valueFrom: {secretKeyRef: {name: {{ required "secrets.name is empty, but one of its entries is named" $root.Values.secrets.name }}, key: {{ . }}}}
{{- end }}
{{- end }}

{{- define "pdserve.sharedEnvironment" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- with include "pdserve.registry" . }}
- name: PDSERVE_REGISTRY
  value: {{ . | quote }}
{{- end }}
{{- include "pdserve.secretVariable" (list . "PDSERVE_CONTROL_TOKEN" "controlToken") }}
{{- include "pdserve.secretVariable" (list . "REDIS_PASSWORD" "redisPassword") }}
{{- include "pdserve.secretVariable" (list . "HF_TOKEN" "huggingFaceToken") }}
{{- end }}

{{- define "pdserve.routerEnvironment" -}}
{{- include "pdserve.sharedEnvironment" . }}
{{- include "pdserve.secretVariable" (list . "PDSERVE_ADMIN_KEY" "adminKey") }}
{{- include "pdserve.secretVariable" (list . "PDSERVE_API_KEY" "apiKey") }}
{{- end }}

{{/* Fields of every pod's spec, with (list $ settings). */}}
{{- define "pdserve.podSettings" -}}
{{- $root := index . 0 }}{{ $settings := index . 1 -}}
automountServiceAccountToken: false
enableServiceLinks: false # variables of other Services, among them PDSERVE_… where one is called pdserve
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "runtimeClassName" "priorityClassName" }}
{{- with index $settings $field }}
{{ $field }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Fields of every container. */}}
{{- define "pdserve.containerSettings" -}}
image: {{ include "pdserve.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext: {{ include "pdserve.unprivileged" . }}
{{- end }}

{{- define "pdserve.unprivileged" -}}
{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end }}

{{/* A volume, with (list name source setting): an emptyDir unless the setting names another source. */}}
{{- define "pdserve.volume" -}}
{{- $source := index . 1 | default (dict "emptyDir" dict) -}}
{{- if gt (len $source) 1 }}{{ fail (printf "%s names more than one source: %s" (index . 2) (keys $source | sortAlpha | join ", ")) }}{{ end -}}
- name: {{ index . 0 }}
  {{- toYaml $source | nindent 2 }}
{{- end }}

{{- define "pdserve.sharedVolumes" -}}
- {name: tmp, emptyDir: {}}
{{ include "pdserve.volume" (list "models" .Values.model.volume "model.volume") }}
{{- with .Values.tls.control }}
- name: control-tls
  secret: {secretName: {{ . }}}
{{- end }}
{{- end }}

{{- define "pdserve.sharedMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: models, mountPath: /models}
{{- if .Values.tls.control }}
- {name: control-tls, mountPath: /etc/pdserve/control, readOnly: true}
{{- end }}
{{- end }}

{{/* Selector of pods of this release, with a dict of `root` and `components`. */}}
{{- define "pdserve.releasePods" -}}
podSelector:
  matchLabels: {app.kubernetes.io/name: {{ .root.Chart.Name }}, app.kubernetes.io/instance: {{ .root.Release.Name }}}
  matchExpressions: [{key: app.kubernetes.io/component, operator: In, values: {{ toJson .components }}}]
{{- end }}

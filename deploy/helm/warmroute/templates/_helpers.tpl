{{- define "warmroute.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* The name of all objects: that of the release, with the chart's unless it is in it. */}}
{{- define "warmroute.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "warmroute.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "warmroute.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "warmroute.selector" -}}
app.kubernetes.io/name: {{ include "warmroute.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "warmroute.labels" -}}
{{ include "warmroute.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "warmroute.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "warmroute.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "warmroute.secretName" -}}
{{- default (include "warmroute.fullname" .) .Values.secretName -}}
{{- end -}}

{{/* drain_delay + drain_timeout + a margin for the last connections and the logs. */}}
{{- define "warmroute.gracePeriod" -}}
{{- add (int .Values.drain.delaySeconds) (int .Values.drain.timeoutSeconds) (int .Values.drain.marginSeconds) -}}
{{- end -}}

{{/* https if the operators' listener has a certificate; the kubelet does not verify it. */}}
{{- define "warmroute.adminScheme" -}}
{{- if dig "admin" "tls" "" .Values.config }}HTTPS{{ else }}HTTP{{ end -}}
{{- end -}}

{{- define "warmroute.apiScheme" -}}
{{- if dig "api" "tls" "" .Values.config }}https{{ else }}http{{ end -}}
{{- end -}}

{{/* What the chart writes into the configuration, over what the values have. */}}
{{- define "warmroute.config" -}}
{{- range $key, $value := dict "api.listen" "ports.http" "api.drain_delay" "drain.delaySeconds" "api.drain_timeout" "drain.timeoutSeconds" "admin.listen" "ports.admin" "peers.listen" "ports.peers" "peers.discovery" "clusterDomain" "endpoint_picker.listen" "ports.picker" -}}
{{- $path := splitList "." $key -}}
{{- if hasKey (dig (first $path) (dict) $.Values.config) (last $path) -}}
{{- fail (printf "config.%s is written by the chart: set the value %s instead" $key $value) -}}
{{- end -}}
{{- end -}}
{{- $adminTls := dig "admin" "tls" dict .Values.config -}}
{{- if and $adminTls.client_ca (ne (default "required" $adminTls.client_auth) "optional") -}}
{{- fail "config.admin.tls.client_auth must be optional: the kubelet's probes and Prometheus have no certificate" -}}
{{- end -}}
{{- range .Values.config.discovery -}}
{{- if hasKey . "kubernetes" -}}
{{- if not $.Values.kubernetesDiscovery.enabled -}}
{{- fail "config.discovery uses the Kubernetes API: set kubernetesDiscovery.enabled, which gives the pods the rights" -}}
{{- end -}}
{{- $namespace := default $.Release.Namespace .kubernetes.namespace -}}
{{- if not (has $namespace ($.Values.kubernetesDiscovery.namespaces | default (list $.Release.Namespace))) -}}
{{- fail (printf "config.discovery looks for engines in the namespace %s, which kubernetesDiscovery.namespaces does not have" $namespace) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $picker := dict -}}
{{- if .Values.endpointPicker.enabled -}}
{{- $pool := .Values.endpointPicker.inferencePool.name -}}
{{- $isDiscovered := false -}}
{{- range .Values.config.discovery -}}
{{- $isHere := eq (default $.Release.Namespace (dig "kubernetes" "namespace" "" .)) $.Release.Namespace -}}
{{- if and $isHere (eq (dig "kubernetes" "inference_pool" "name" "" .) $pool) -}}{{- $isDiscovered = true -}}{{- end -}}
{{- end -}}
{{- if not $isDiscovered -}}
{{- fail (printf "endpointPicker answers for the engines of its pool: set config.discovery to [{kubernetes: {inference_pool: {name: %s}}}]" $pool) -}}
{{- end -}}
{{- $listen := dict "listen" (printf ":%d" (int .Values.ports.picker)) -}}
{{- if not (dig "endpoint_picker" "tls" "" .Values.config) -}}
{{- $listen = merge $listen (dict "tls" (dict "self_signed" true)) -}}
{{- end -}}
{{- $picker = dict "endpoint_picker" $listen -}}
{{- end -}}
{{- $peersName := printf "%s-peers.%s.svc.%s." (include "warmroute.fullname" .) .Release.Namespace .Values.clusterDomain -}}
{{- $peers := dict "listen" (printf ":%d" (int .Values.ports.peers)) "discovery" (list (dict "dns" (dict "name" $peersName "port" (int .Values.ports.peers)))) -}}
{{- if not (dig "peers" "tls" "" .Values.config) -}}
{{- $peers = merge $peers (dict "secret" (dig "peers" "secret" "${PEERS_SECRET}" .Values.config)) -}}
{{- end -}}
{{- $own := dict
  "api" (dict
    "listen" (printf ":%d" (int .Values.ports.http))
    "drain_delay" (printf "%ds" (int .Values.drain.delaySeconds))
    "drain_timeout" (printf "%ds" (int .Values.drain.timeoutSeconds)))
  "admin" (dict "listen" (printf ":%d" (int .Values.ports.admin)))
  "peers" $peers -}}
{{- mergeOverwrite (deepCopy .Values.config) $own $picker | toYaml -}}
{{- end -}}

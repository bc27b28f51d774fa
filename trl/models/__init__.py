"""The policy: loading, adapters, reference policy, scoring."""

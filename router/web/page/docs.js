// Shows /openapi.json in Swagger UI. `validatorUrl: null`: the document is not sent to another host for validation.

SwaggerUIBundle({ url: "/openapi.json", dom_id: "#swagger-ui", validatorUrl: null });

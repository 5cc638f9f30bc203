// Shows /openapi.json in Swagger UI. `validatorUrl: null`: the document is not sent to another host for validation.

const dark = matchMedia("(prefers-color-scheme: dark)"), follow = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", follow);
follow();
SwaggerUIBundle({ url: "/openapi.json", dom_id: "#swagger-ui", validatorUrl: null });
